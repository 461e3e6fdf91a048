"""An evaluation during which one rank stays away from the encoder, as the ranks of the demo do it."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from nemo.collections.asr.modules import ConformerEncoder

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.jobs import EVALUATION_BATCHES, Job, LongestCall, StaysAway, ValidationBatch
from nemo_patches.tools.demo.nest import FEATURES, conformer

AWAY_AFTER, FRAMES = 2, 200  # batches; of features
LONGEST_REPORT_S = 10.0


def evaluate(job: Job, events: Connection) -> None:
    """Evaluate batch after batch; the rank that is to stay away reads on for as long as the demo lets it."""
    dist.init_process_group("gloo", timeout=job.limit)
    encoder = ConformerEncoder(**conformer()).eval()
    with torch.inference_mode():
        for batch in range(EVALUATION_BATCHES):
            if job.stays_away and batch == AWAY_AFTER:
                read_a_file_that_never_comes(job, events)
            began = time.monotonic()
            encoder(audio_signal=torch.zeros(2, FEATURES, FRAMES), length=torch.tensor([FRAMES] * 2))
            events.send(LongestCall(timedelta(seconds=time.monotonic() - began)))
            events.send(ValidationBatch())
    deadline = time.monotonic() + LONGEST_REPORT_S
    while job.patched and not logs.warnings(job.log) and time.monotonic() < deadline:
        time.sleep(0.05)  # a job goes on here; this one would end before the line on the missing rank is written


def read_a_file_that_never_comes(job: Job, events: Connection) -> None:
    events.send(StaysAway())
    time.sleep(job.limit.total_seconds())  # the demo ends it long before
