"""Sortformer in streaming mode: another reduce of a length, at every validation batch.

It pads every rank's features to the longest of all ranks, so it changes shapes and cannot be
skipped. No fallback helps there, and one rank with an extra batch waits for ever.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/models/sortformer_diar_models.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4}
model: {streaming_mode: true, sortformer_modules: {}}
"""
GOOD = BAD.replace("streaming_mode: true", "streaming_mode: false")


def check(job: Job) -> Findings:
    """A model that has Sortformer's modules."""
    switch = job.get("model.streaming_mode", False)
    if job.several and switch.on and job.get("model.sortformer_modules").given:
        what = (
            f"streaming_mode reduces the longest input over {job.all_ranks}, beside the"
            " encoder's length sync"
        )
        yield note(what, switch, "the same number of batches on every rank")
