"""The doctor's words stand in tests/golden/doctor.txt: one example of each finding, and of what
else it prints.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import configs
import job_ranks
import machines
import pytest
import transcripts

from nemo_patches.tools.doctor import examination, formats
from nemo_patches.tools.doctor.rules import all_rules

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

BESIDE_NEMO = {"NP403", "NP408"}  # which compare code with the installed NeMo


def _show(about: str, subject: Any) -> None:
    """As the annotations of GitHub, which have also of a note what to do."""
    found = examination.checked(subject, examination.chosen(), about)
    print(*formats.github([examination.Examination(about, "", found)]), sep="\n")


def _machine(**facts: Any) -> None:
    _show("machine", machines.machine(**facts))


def _ranks(*facts: Any, silent: int | None = None) -> None:
    """silent: a rank without an answer."""
    told = job_ranks.ranks(*facts)
    heard = {rank: facts for rank, facts in told.facts.items() if rank != silent}
    _show("ranks", replace(told, facts=heard))


def test_the_doctors_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = {rule.identifier: rule.bad for rule in all_rules() if rule.bad}
    for name, text in (
        {"nest": configs.NEST, "lhotse": configs.LHOTSE} | examples
    ).items():
        (tmp_path / f"{name}.yaml").write_text(text)
    transcripts.compare("doctor", tmp_path, {"machine": _machine, "ranks": _ranks})


def test_each_rule_has_an_example() -> None:
    shown = (transcripts.GOLDEN / "doctor.txt").read_text()
    found = set(re.findall(r"(NP\d+)(?:::| error: | warning: )", shown))
    assert {rule.identifier for rule in all_rules()} - found == {
        examination.CRASHED,
        *BESIDE_NEMO,
    }
