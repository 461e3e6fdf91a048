"""Code for the doctor's tests, and what one rule finds in it beside the installed NeMo."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import RuleFinding

beside_nemo = pytest.mark.skipif(
    importlib.util.find_spec("nemo") is None, reason="NeMo is not installed"
)

HEAD = """\
import torch
import torch.distributed as dist
from nemo.collections.asr.models import EncDecCTCModel
from nemo.collections.asr.modules import ConformerEncoder
from nemo.core.classes import typecheck


"""


def found(folder: Path, rule: str, text: str) -> list[RuleFinding]:
    """What one rule finds; the others must not fail on it, either, and nothing of it runs."""
    path = folder / "model.py"
    path.write_text(f"{HEAD}{text}\nraise SystemExit('it was run')\n")
    done = examination.examine_code(path, examination.chosen())
    assert not done.error, done.error
    assert not [
        finding for checked, finding in done.findings if checked.identifier == "NP001"
    ]
    return [finding for checked, finding in done.findings if checked.identifier == rule]
