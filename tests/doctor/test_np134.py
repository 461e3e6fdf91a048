"""NP134: batches by duration, of inputs without a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NOTE, found

pytestmark = pytest.mark.one_nemo

NO_LIMIT = "model.train_ds.max_duration=null"


def test_without_a_limit(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP134", LHOTSE, NO_LIMIT)
    assert finding.severity is NOTE


@pytest.mark.parametrize(
    "overrides",
    [(), (NO_LIMIT, "trainer.devices=1"), (NO_LIMIT, "model.train_ds.batch_duration=null"),
     (NO_LIMIT, "model.train_ds.use_lhotse=false"), (NO_LIMIT, "+model.train_ds.truncate_duration=20")],
)  # fmt: skip
def test_not_of_others(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP134", LHOTSE, *overrides) == []


def test_in_the_section_of_a_tts_model(tmp_path: Path) -> None:
    text = "trainer: {devices: 8}\nmodel:\n  train_ds:\n    use_lhotse: true\n"
    text += "    dataset: {batch_duration: 200, shar_path: a}\n"
    (finding,) = found(tmp_path, "NP134", text)
    assert finding.line == 5
    assert len(found(tmp_path, "NP104", text)) == 1  # nor has its epoch an end
    assert (
        found(tmp_path, "NP134", text.replace("use_lhotse: true", "use_lhotse: false"))
        == []
    )
