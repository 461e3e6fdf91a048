"""NP133: a scheduler without max_steps, and Lhotse's sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

NO_STEPS = ("+model.optim={sched: {name: CosineAnnealing}}", "~trainer.max_steps")


@pytest.mark.parametrize(
    "more", [(), ("trainer.devices=1",), ("+trainer.limit_train_batches=100",)]
)
def test_the_job_stops(tmp_path: Path, more: tuple[str, ...]) -> None:
    (finding,) = found(tmp_path, "NP133", LHOTSE, *NO_STEPS, *more)
    assert finding.severity is WARNING


def test_a_scheduler_that_is_null_stops_it_too(tmp_path: Path) -> None:
    """setup_optimization writes the number of steps into it: 2.7 and 3.0."""
    null = "+model.optim={name: adamw, sched: null}"
    for text in (LHOTSE, NEST):
        (finding,) = found(tmp_path, "NP133", text, null)
        assert finding.what.startswith("model.optim.sched is null")
        assert found(tmp_path, "NP133", text, null, "++model.optim.sched={}") == []
        assert found(tmp_path, "NP133", text, null, "~model.encoder") == []


def test_an_audio_codec_counts_by_itself(tmp_path: Path) -> None:
    loader = "++model.train_ds={dataloader_params: {use_lhotse: true, shar_path: x}}"
    assert found(tmp_path, "NP133", LHOTSE, *NO_STEPS, loader) == []


@pytest.mark.parametrize(
    "more",
    [
        ("+trainer.max_steps=1000",),
        ("+trainer.fast_dev_run=true",),
        ("+model.optim.sched.max_steps=1000",),
        ("+model.optim.sched.max_steps=-1",),  # NeMo then makes no scheduler
        ("~model.optim.sched.name",),
        ("model.train_ds.use_lhotse=false",),
    ],
)
def test_not_where_its_steps_are_known(tmp_path: Path, more: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP133", LHOTSE, *NO_STEPS, *more) == []
    assert found(tmp_path, "NP133", NEST, NO_STEPS[0]) == []
