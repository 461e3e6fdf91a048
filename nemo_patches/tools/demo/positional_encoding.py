"""Training a Conformer encoder under DDP without the length sync, with one long batch on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nemo.collections.asr.modules import ConformerEncoder
from torch.nn.parallel import DistributedDataParallel

from nemo_patches.tools.demo.jobs import RankJob, WrongRows
from nemo_patches.tools.demo.nest import FEATURES, conformer

POSITIONS, LONG_BATCH, SHORT_BATCH = 500, 900, 200  # frames: the encoding's first size, and two batches


def grow(job: RankJob) -> WrongRows:
    """Train with a batch that outgrows one rank's positional encoding, and count the rows that are wrong afterwards."""
    dist.init_process_group("gloo", timeout=job.limit)
    torch.manual_seed(0)
    encoder = _encoder_of(POSITIONS)
    model = DistributedDataParallel(encoder)
    for step in range(4):
        frames = LONG_BATCH if step == 1 and job.rank == job.slow_rank else SHORT_BATCH
        encoded, _ = model(audio_signal=torch.randn(2, FEATURES, frames), length=torch.tensor([frames] * 2))
        model.zero_grad()
        encoded.pow(2).mean().backward()
    rows = encoder.pos_enc.pe
    right = _encoder_of((rows.size(1) + 1) // 2).pos_enc.pe  # a fresh one of that length
    return WrongRows(wrong=int((rows != right).any(-1).sum()), total=rows.size(1))


def _encoder_of(positions: int) -> Any:
    return ConformerEncoder(**conformer(), pos_emb_max_len=positions, sync_max_audio_length=False)
