"""What a trace's header says of the settings that ranks are to have alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_patches.sync.settings import DEFERRED, EVALUATION, STAGES, TRAINING, Settings
from nemo_patches.tracing.trace_header import make_header

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (Settings(), {}),
        (Settings(metrics=DEFERRED), {"metrics": "deferred"}),
        (
            Settings(metrics=DEFERRED, stop_together=(EVALUATION,)),
            {"metrics": "deferred", "stop_together": "evaluation"},
        ),
        (Settings(stop_together=STAGES), {"stop_together": f"{TRAINING},{EVALUATION}"}),
        (
            Settings(trace=Path("/a"), trace_checks=("cuda",)),
            {},
        ),  # the folders may differ
    ],
)
def test_the_header_carries_what_is_done_about_uneven_batches(
    chosen: Settings, told: dict[str, str]
) -> None:
    settings = make_header(chosen, chosen.trace_checks, 1e9).settings
    of_layer = {
        "sync": "bounded",
        "timeout": "10",
        "on_timeout": "fallback",
        "stall_timeout": "60",
        "stall_exit": "0",
        "on_stall": "none",
    }
    assert settings == {**of_layer, **told}


def test_a_requeued_job_has_the_number_of_its_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for attempt, job in (("", "slurm 7.0"), ("2", "slurm 7.0 restart 2")):
        monkeypatch.setenv("SLURM_RESTART_COUNT", attempt or "0")
        assert make_header(Settings(), (), 1e9).job == job
