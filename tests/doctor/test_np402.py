"""NP402: other collectives than NeMo's own method."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import beside_nemo, found

pytestmark = [pytest.mark.one_nemo, beside_nemo]


STEP = "class Mine(EncDecCTCModel):\n    def training_step(self, batch, batch_nb):\n        dist.barrier()\n"


def test_a_collective_more_or_less(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP402", STEP)
    assert finding.what == "Mine.training_step: its collectives are barrier, those of NeMo's EncDecCTCModel: none"
    own = "class Mine(ConformerEncoder):\n    def update_max_seq_length(self, seq_length, device):\n        pass\n"
    (finding,) = found(tmp_path, "NP402", own)
    assert finding.what.endswith("its collectives are none, those of NeMo's ConformerEncoder: all_reduce")


def test_none_with_nemos_own_method_or_a_class_that_is_not_nemos(tmp_path: Path) -> None:
    assert found(tmp_path, "NP402", STEP + "        return super().training_step(batch, batch_nb)\n") == []
    assert found(tmp_path, "NP402", STEP.replace("EncDecCTCModel", "torch.nn.Module")) == []
