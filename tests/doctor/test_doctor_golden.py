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
from rich.console import Console

from nemo_patches.tools.doctor import examination, report
from nemo_patches.tools.doctor.gloo_probe import Gloo
from nemo_patches.tools.doctor.machine import Memory
from nemo_patches.tools.doctor.ranks import Smoke

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

FRAME = re.compile(r"    why: |[^:]+: (judged as|nothing$|\d+ (error|warning|note|class)|.*notes that nearly)")


def _kept(typed: str, line: str) -> bool:
    """Of some rules, what they find, as docs/doctor.md has why; of all rules, the whole report."""
    return not FRAME.match(line) or ("--select" not in typed and not typed.startswith(("machine", "ranks")))


def _show(about: str, subject: Any) -> None:
    found = examination.checked(subject, examination.chosen(), about)
    report.show([examination.Examination(about, "judged as it is", found)], Console(width=80), fold=False)


def _machine(**facts: Any) -> None:
    _show("machine", machines.machine(**facts))


def _ranks(*facts: Any, **given: Any) -> None:
    """smoke: what came of the backend's test; silent, unmeasured: a rank without an answer, without measurements."""
    smoke, silent, unmeasured = (given.pop(name, None) for name in ("smoke", "silent", "unmeasured"))
    told = job_ranks.ranks(*facts, **given)
    heard = {rank: facts for rank, facts in told.facts.items() if rank != silent}
    measured = {rank: each for rank, each in told.measured.items() if rank != unmeasured}
    _show("ranks", replace(told, facts=heard, measured=measured, smoke=smoke))


def test_the_doctors_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("nest", configs.NEST), ("lhotse", configs.LHOTSE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    names = {"machine": _machine, "ranks": _ranks, "environment": machines.environment, "Gloo": Gloo, "Memory": Memory}
    transcripts.compare("doctor", tmp_path, {**names, "Smoke": Smoke, "VERSIONS": machines.VERSIONS}, _kept)
