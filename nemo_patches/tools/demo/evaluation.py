"""The demo's evaluation, in which one rank stays away from the encoder."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from nemo.collections.asr.modules import ConformerEncoder

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.jobs import EVALUATION_BATCHES, EncoderCall, Notice, RankJob
from nemo_patches.tools.demo.nest import FEATURES, conformer

AWAY_AFTER, FRAMES = 2, 200  # batches; of features
LONGEST_REPORT_S = 10.0


def evaluate(job: RankJob, events: Connection) -> None:
    """Evaluate batch after batch; the rank that stays away reads until the demo ends it."""
    dist.init_process_group("gloo", timeout=job.limit)
    encoder = ConformerEncoder(**conformer()).eval()
    with torch.inference_mode():
        for batch in range(EVALUATION_BATCHES):
            if job.stays_away and batch == AWAY_AFTER:
                read_a_file_that_never_comes(job, events)
            began = time.monotonic()
            encoder(audio_signal=torch.zeros(2, FEATURES, FRAMES), length=torch.tensor([FRAMES] * 2))
            events.send(EncoderCall(timedelta(seconds=time.monotonic() - began)))
            events.send(Notice.VALIDATED)
    deadline = time.monotonic() + LONGEST_REPORT_S
    while job.patched and not logs.warnings(job.log) and time.monotonic() < deadline:
        time.sleep(0.05)  # a real job goes on; this one would end before its line about the missing rank is written


def read_a_file_that_never_comes(job: RankJob, events: Connection) -> None:
    events.send(Notice.STAYS_AWAY)
    time.sleep(job.limit.total_seconds())  # the demo kills it long before
