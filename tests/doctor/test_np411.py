"""NP411: an alarm around a collective; classes_hang.txt and classes_fine.txt have more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import NOTE, WARNING

pytestmark = pytest.mark.one_nemo

CODE = """\
import signal

def train(value, handler, model):
    signal.signal(signal.SIGALRM, handler)
    signal.alarm(10)
    {}
    signal.alarm(0)
    dist.barrier()
"""


def test_the_reason_is_said(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP411", CODE.format("dist.all_reduce(value)"))
    assert finding.severity is WARNING
    assert "only after the call into C++ has returned" in finding.what
    assert "the alarm of line 12" in finding.what
    assert finding.line == 13


def test_a_guess_stays_one(tmp_path: Path) -> None:
    text = CODE.format("model = DDP(model); model(value)")
    (finding,) = found(tmp_path, "NP411", "from torch.nn.parallel import DDP\n" + text)
    assert finding.severity is NOTE
    assert "A guess" in finding.what


def test_what_is_no_collective(tmp_path: Path) -> None:
    assert found(tmp_path, "NP411", CODE.format("value = value.sum()")) == []
