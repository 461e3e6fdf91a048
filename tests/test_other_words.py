"""Logs in words that no table has: general rows, labels that are learned, and what is told beside a
verdict. Harmless ones are among them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diagnosing import report_of

from nemo_patches.tools.diagnose.findings import MISSING_RANK, NOT_ENOUGH

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
EXAMPLES = Path(__file__).with_name("logs") / "other_words.txt"


def examples() -> dict[str, tuple[str, list[tuple[str, str]], str]]:
    """By name: whom it accuses, or that it is harmless; what is said, and what not; the log."""
    found = {}
    for one in EXAMPLES.read_text().split("\n=== [")[1:]:
        head, _, log = one.partition("\n")
        kind, _, name = head.partition("] ")
        patterns = []
        while log.startswith(("says: ", "not: ")):
            line, _, log = log.partition("\n")
            key, _, pattern = line.partition(": ")
            patterns.append((key, pattern))
        found[name] = kind, patterns, log + "\n"
    return found


@pytest.mark.parametrize("name", examples())
def test_examples(name: str, tmp_path: Path) -> None:
    kind, patterns, log = examples()[name]
    (tmp_path / "train.log").write_text(log)
    found = report_of(tmp_path / "train.log")
    told = [f"{one.id}: {one.text}" for one in found.findings]
    said = "\n".join([found.verdict, *told])
    first, *_ = [*(set(one.ranks) for one in found.findings), set()]
    sets = [{int(rank) for rank in re.findall(r"\d+", one)} for one in kind.split("|")]
    assert first in sets, said
    accused = {rank for one in found.findings for rank in one.ranks}
    assert accused <= set().union(*sets), said
    for key, pattern in patterns:
        assert bool(re.search(pattern, said)) == (key == "says"), (pattern, said)
    guesses = [one for one in found.findings if "guess" in one.text.lower()]
    assert not any(one.ranks for one in guesses), said
    if kind == "harmless":
        assert {one.id for one in found.findings} <= {NOT_ENOUGH}, said


def test_numbers_that_are_none_or_too_long_end_no_reader(tmp_path: Path) -> None:
    long = "9" * 5000
    (tmp_path / "train.log").write_text(
        '{"device_id": "2.1", "rank_id": "1.2"}\n'
        '{"device_id": "2", "device_ip": "...", "rank_id": "10"}\n'
        f"PID STAT COMMAND\n{long} Sl python train.py --rank 1\n{long}1 T python --rank 2\n"
        f"rank  age_s\n0     1.2.3\n1     {long}\n2     4\n"
    )
    assert {one.id for one in report_of(tmp_path / "train.log").findings} <= {
        NOT_ENOUGH,
        MISSING_RANK,
    }
