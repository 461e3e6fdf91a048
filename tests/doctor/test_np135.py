"""NP135: a limit on an epoch that a rank's own batches never reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

LIMIT = "+trainer.limit_train_batches=100"
FIXED = ("model.train_ds.batch_duration=null", "+model.train_ds.batch_size=2")


def test_what_cannot_be_counted_is_a_note(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP135", LHOTSE, LIMIT)
    assert finding.severity is NOTE


def test_entries_are_counted_where_they_are(tmp_path: Path) -> None:
    manifest = tmp_path / "train.json"
    manifest.write_text("{}\n" * 400)  # 200 batches, 50 on each of 4 ranks
    given = (f"model.train_ds.manifest_filepath={manifest}", *FIXED)
    (finding,) = found(tmp_path, "NP135", LHOTSE, LIMIT, *given)
    assert finding.severity is WARNING
    assert finding.what.endswith("has 50")
    for enough in ("trainer.limit_train_batches=50", "+trainer.val_check_interval=0.5"):
        assert found(tmp_path, "NP135", LHOTSE, LIMIT, *given, enough) == []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (LIMIT, "trainer.devices=1"),
        (LIMIT, "+trainer.check_val_every_n_epoch=null"),  # it counts on over epochs
        (LIMIT, "+model.train_ds.shar_path=x"),  # repeated for ever
        (LIMIT, "model.train_ds.use_lhotse=false"),
        (LIMIT, "~model.validation_ds"),
        ("+trainer.limit_train_batches=1.0",),
        ("+trainer.fast_dev_run=true",),
        ("+trainer.overfit_batches=10",),
        (LIMIT, "+trainer.limit_val_batches=0"),
        (LIMIT, "+trainer.limit_val_batches=0.0"),
    ],
)
def test_not_of_others(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP135", LHOTSE, *overrides) == []
