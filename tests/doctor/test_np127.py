"""NP127: max_time; that Lightning's timer broadcasts is seen in its own code, run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    "override",
    ["+trainer.max_time=00:03:50:00", "++exp_manager.max_time_per_run=00:03:50:00"],
)
def test_a_timer_is_noted(tmp_path: Path, override: str) -> None:
    (finding,) = found(tmp_path, "NP127", NEST, override)
    assert finding.severity is NOTE
    assert found(tmp_path, "NP127", NEST, override, "trainer.devices=1") == []


def test_none_without(tmp_path: Path) -> None:
    assert found(tmp_path, "NP127", NEST) == []
    assert found(tmp_path, "NP127", NEST, "+trainer.max_time=null") == []


def test_the_timer_broadcasts_after_every_batch() -> None:
    Timer = pytest.importorskip("lightning.pytorch.callbacks").Timer

    asked: list[Any] = []
    strategy = SimpleNamespace(broadcast=lambda value: asked.append(value) or value)
    trainer: Any = SimpleNamespace(strategy=strategy, should_stop=False)
    timer = Timer(timedelta(hours=1), interval="step")
    for _ in range(3):
        timer.on_train_batch_end(trainer)
    assert asked == [False] * 3
