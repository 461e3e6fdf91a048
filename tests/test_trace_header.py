"""What a trace's header says of the settings that ranks are to have alike."""

from __future__ import annotations

import pytest

from nemo_patches.patching.settings import (
    DEFERRED,
    EVALUATION,
    STAGES,
    TRAINING,
    OptionSettings,
    TraceSettings,
)
from nemo_patches.sync import length_sync
from nemo_patches.tracing.trace_header import make_header
from nemo_patches.watch import subscriber

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (OptionSettings(), {}),
        (OptionSettings(DEFERRED), {"metrics": "deferred"}),
        (OptionSettings(DEFERRED, (EVALUATION,)), {"metrics": "deferred", "stop_together": "evaluation"}),
        (OptionSettings(stop_together=STAGES), {"stop_together": f"{TRAINING},{EVALUATION}"}),
    ],
)
def test_the_header_carries_what_is_done_about_uneven_batches(chosen: OptionSettings, told: dict[str, str]) -> None:
    before, others = subscriber.settings_in_force(), subscriber.other_settings()
    subscriber.use(before, str(chosen))
    try:
        settings = make_header(TraceSettings(), length_sync.current(), 1e9).settings
    finally:
        subscriber.use(before, others)
    assert {name: settings[name] for name in ("metrics", "stop_together") if name in settings} == told
    assert settings["sync"] == "bounded"
