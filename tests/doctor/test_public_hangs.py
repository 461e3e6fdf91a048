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

FEWEST_FOUND = 31  # docs/doctor.md has the numbers


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


@pytest.mark.parametrize("snippet", [*HANGS, *OF_CLASSES], ids=lambda each: each.title)
def test_a_hang(tmp_path: Path, snippet: Snippet) -> None:
    rule = snippet.title.partition(" ")[0]
    said = findings(tmp_path, snippet)
    if rule == "missed":
        assert said == []
        return
    marked = [
        number
        for number, line in enumerate(snippet.text.splitlines(), 1)
        if line.endswith("# !")
    ]
    assert [identifier for identifier, *_ in said] == [rule], said
    assert not marked or said[0][1] == marked[0]


def test_how_many() -> None:
    assert sum(not each.title.startswith("missed") for each in HANGS) >= FEWEST_FOUND
    assert len({each.title for each in [*HANGS, *OF_CLASSES]}) == len(HANGS) + len(
        OF_CLASSES
    )


@pytest.mark.parametrize("snippet", FINE, ids=lambda each: each.title)
def test_what_looks_alike_and_is_right(tmp_path: Path, snippet: Snippet) -> None:
    assert [
        each for each in findings(tmp_path, snippet) if each[2] > Severity.NOTE
    ] == []
