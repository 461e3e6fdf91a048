"""Recipes as people train them, clean, and what changes make of them: recipes.txt, beside this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, yaml_text
from nemo_patches.tools.doctor.finding import Severity
from nemo_patches.tools.doctor.job import Job

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
# Notes that nearly every config gets.
OF_NEARLY_ALL = ("NP005", "NP101")


@dataclass(frozen=True)
class Recipe:
    """cases: by the line of recipes.txt the changes, and what an expert says."""

    text: str
    cases: dict[str, tuple[list[str], list[str]]]


def read() -> Iterator[tuple[str, Recipe]]:
    _, *blocks = Path(__file__).with_name("recipes.txt").read_text().split("\n=== ")
    for block in blocks:
        name, _, rest = block.partition(": ")
        text, _, lines = rest.partition("\n")[2].partition("\n---\n")
        cases = {}
        for line in lines.strip().splitlines():
            changes, _, said = line.partition("  # ")[0].partition(" => ")
            if changes.startswith("["):
                changes = changes.partition("] ")[2]
            expected = [] if said == "clean" else said.split(", ")
            cases[line] = changes.split(" ; "), expected
        yield name, Recipe(text, cases)


RECIPES = dict(read())
# What the SALM recipe reads, from a file of its own as such recipes have it.
TRAIN = """\
- type: lhotse_as_conversation
  shar_path: ${oc.env:DATA}/asr
- {type: group, input_cfg: more.yaml}
"""
MORE = "- {type: lhotse_as_conversation, shar_path: st}\n"


@pytest.fixture(autouse=True)
def _in_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "more.yaml").write_text(MORE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_clean_and_a_change_is_what_an_expert_says(name: str) -> None:
    source = yaml_text.parse(Path(f"{name}.yaml"), RECIPES[name].text)

    def said(overrides: list[str]) -> list[str]:
        config = reading.with_overrides(source, overrides)
        findings = examination.checked(Job(config), examination.chosen())
        return sorted(
            {
                f"{rule.identifier} {finding.severity}"
                for rule, finding in findings
                if finding.severity > Severity.NOTE
            }
        )

    assert said([]) == []
    findings = examination.checked(
        Job(reading.with_overrides(source)), examination.chosen()
    )
    notes = [rule for rule, _ in findings if rule.identifier not in OF_NEARLY_ALL]
    assert len(notes) <= 1, findings
    wrong = {
        line: found
        for line, (changes, expected) in RECIPES[name].cases.items()
        if (found := said(changes)) != expected
    }
    assert wrong == {}


def test_so_many_recipes_and_changes_are_read() -> None:
    lines = [line for recipe in RECIPES.values() for line in recipe.cases]
    assert len(RECIPES) == 7
    assert len([line for line in lines if line.startswith("[")]) >= 64
    assert len(lines) >= 140
