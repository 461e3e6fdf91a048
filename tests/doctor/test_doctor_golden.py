"""The doctor's words stand in tests/golden/doctor.txt, with a config, code, a machine or ranks for each."""

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

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

FRAME = re.compile(r"    why: |[^:]+: (judged as|nothing$|\d+ (error|warning|note|class)|.*notes that nearly)")


def _kept(typed: str, line: str) -> bool:
    """Of some rules, what they find, as docs/doctor.md has why; of all rules, the whole report."""
    return "--select" not in typed or not FRAME.match(line)


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
    for name, text in (("nest", configs.NEST), ("lhotse", configs.LHOTSE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    transcripts.compare("doctor", tmp_path, {"machine": _machine, "ranks": _ranks}, _kept)
