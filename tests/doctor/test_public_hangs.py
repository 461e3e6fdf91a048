"""The rules on code beside reproductions of public reports, others of their kinds, and what is
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Severity

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

FEWEST_FOUND = 33  # docs/doctor.md has the numbers


@dataclass(frozen=True)
class Snippet:
    title: str
    text: str


def snippets(name: str) -> Iterator[Snippet]:
    _, *parts = Path(__file__).with_name(name).read_text().split("\n=== ")
    for part in parts:
        title, _, text = part.partition("\n")
        yield Snippet(title, text)


HANGS = list(snippets("public_hangs.txt"))
OF_CLASSES = list(snippets("classes_hang.txt"))
FINE = [*snippets("public_fine.txt"), *snippets("classes_fine.txt")]


def findings(
    folder: Path, snippet: Snippet
) -> list[tuple[str, int | None, Severity, str]]:
    path = folder / "model.py"
    path.write_text(snippet.text)
    done = examination.examine_code(path, examination.chosen(["NP4"]))
    assert not done.error, done.error
    return [
        (rule.identifier, each.line, each.severity, each.what)
        for rule, each in done.findings
    ]


def wrong_in_a_hang(folder: Path, snippet: Snippet) -> object:
    """What is said of it, where that is not what its title and its mark ask for."""
    rule = snippet.title.partition(" ")[0]
    said = findings(folder, snippet)
    found = [(identifier, line) for identifier, line, *_ in said]
    if rule == "missed":
        return found
    lines = snippet.text.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# !")]
    noted = [severity is Severity.NOTE for _, _, severity, _ in said]
    is_right = (
        [identifier for identifier, _ in found] == [rule]
        and (not marked or found[0][1] == marked[0])
        and noted == ["a note" in snippet.title]
    )
    return None if is_right else said or "nothing"


def test_each_hang_is_found_at_its_line(tmp_path: Path) -> None:
    each = [*HANGS, *OF_CLASSES]
    wrong = {
        one.title: found for one in each if (found := wrong_in_a_hang(tmp_path, one))
    }
    assert not wrong


def test_how_many() -> None:
    assert sum(not each.title.startswith("missed") for each in HANGS) >= FEWEST_FOUND
    assert len({each.title for each in [*HANGS, *OF_CLASSES]}) == len(HANGS) + len(
        OF_CLASSES
    )


def test_what_looks_alike_and_is_right(tmp_path: Path) -> None:
    wrong = {
        one.title: warned
        for one in FINE
        if (warned := [f for f in findings(tmp_path, one) if f[2] > Severity.NOTE])
    }
    assert not wrong
