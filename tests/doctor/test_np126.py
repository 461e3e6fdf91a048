"""NP126: always_save_nemo with save_best_model; tests/test_checkpoints.py has the hang, on real
ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo
PARAMS = "++exp_manager.checkpoint_callback_params"
BOTH = (f"{PARAMS}.always_save_nemo=true", f"{PARAMS}.save_best_model=true")


def test_both_together_hang(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP126", NEST, *BOTH)
    assert finding.severity is WARNING


def test_none_otherwise(tmp_path: Path) -> None:
    for overrides in (BOTH[:1], BOTH[1:], (*BOTH, "trainer.devices=1")):
        assert found(tmp_path, "NP126", NEST, *overrides) == []
    off = "++exp_manager.create_checkpoint_callback=false"
    assert found(tmp_path, "NP126", NEST, *BOTH, off) == []


@pytest.mark.parametrize("mode", ["test", "Inference", "predict", "train", "dpo_train"])
def test_a_config_whose_mode_is_to_test_saves_nothing(
    tmp_path: Path, mode: str
) -> None:
    warned = bool(found(tmp_path, "NP126", NEST, *BOTH, f"++mode={mode}"))
    assert warned is ("train" in mode)
