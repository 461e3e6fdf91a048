"""One rank of the demo: an evaluation, a training, or an encoder that grows. Imports NeMo."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.seed import isolate_rng
from nemo.collections.asr.modules import ConformerEncoder
from torch.nn.parallel import DistributedDataParallel

import nemo_patches
from nemo_patches.tools.demo import job_logs, nest
from nemo_patches.tools.demo.jobs import (
    EVALUATION_BATCHES,
    LENGTH_SYNC_TIMEOUT_S,
    STALL_AFTER_STEPS,
    TRAINING_STEPS,
    VALIDATE_EVERY,
    RankJob,
    RankProgress,
)

AWAY_AFTER = 2  # batches
# Frames: the positional encoding's first size, and two batches.
POSITIONS, LONG_BATCH, SHORT_BATCH = 500, 900, 200
LONGEST_REPORT_S = 10.0


def run(job: RankJob) -> None:
    """Do this rank's job; what it prints goes to the job's log, and how far it is to a file that
    the parent reads.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's, as it may wait in C++
    # The parent, if it is there, ends it at the limit.
    signal.alarm(math.ceil(job.limit_s) + 10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file where stock aborts
    job_logs.write_to(job.log)
    rank, size = str(job.rank), str(job.world_size)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        NODE_RANK="0",
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
    torch.set_num_threads(1)
    reporter = Reporter(job)
    try:
        if job.patched:
            nemo_patches.apply(
                sync="bounded", timeout=LENGTH_SYNC_TIMEOUT_S, on_timeout="fallback"
            )
        else:
            nemo_patches.revert()  # the user may have auto-apply on, and stock must be stock
        {"evaluation": evaluate, "training": pretrain, "positions": grow}[job.task](
            job, reporter
        )
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class Reporter(pl.Callback):  # type: ignore[misc]  # Lightning's types are not followed
    """Saves how far this rank has come, and restores the random state (torch's, numpy's, Python's)
    after an evaluation.

    NEST draws random numbers for an evaluation's noise and masks, so that one more batch would
    change the training after it, in stock NeMo as with nemo_patches. With this, losses can be
    compared with those after an even evaluation.
    """

    def __init__(self, job: RankJob) -> None:
        self._job = job
        self._progress = RankProgress()
        self._began = 0.0

    def change(self, **changes: Any) -> None:
        self._progress = replace(self._progress, **changes)
        self._job.save(self._progress)

    def time_calls_of(self, encoder: torch.nn.Module) -> None:
        """Without the hooks that were registered before."""
        encoder.register_forward_pre_hook(self._call_begins)
        encoder.register_forward_hook(self._call_ends)

    def _call_begins(self, *_: object) -> None:
        self._began = time.monotonic()

    def _call_ends(self, *_: object) -> None:
        took_s = time.monotonic() - self._began
        self.change(longest_call_s=max(self._progress.longest_call_s, took_s))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.change(losses=[*self._progress.losses, float(outputs["loss"])])

    def on_validation_batch_end(self, *_: object, **__: object) -> None:
        self.change(validation_batches=self._progress.validation_batches + 1)

    def on_validation_start(self, *_: object) -> None:
        self._isolated = isolate_rng(include_cuda=False)
        self._isolated.__enter__()

    def on_validation_end(self, *_: object) -> None:
        self._isolated.__exit__(None, None, None)


def evaluate(job: RankJob, reporter: Reporter) -> None:
    """Evaluate batch after batch; the rank that stays away reads until the demo ends it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.limit_s))
    encoder = ConformerEncoder(**nest.conformer()).eval()
    reporter.time_calls_of(encoder)
    with torch.inference_mode():
        for batch in range(EVALUATION_BATCHES):
            if job.stays_away and batch == AWAY_AFTER:
                read_a_file_that_never_comes(job, reporter)
            encode(encoder, SHORT_BATCH)
            reporter.on_validation_batch_end()
    deadline = time.monotonic() + LONGEST_REPORT_S
    while (
        job.patched and not job_logs.warnings(job.log) and time.monotonic() < deadline
    ):
        # A real job goes on; this one would end before its line about the missing rank is written.
        time.sleep(0.05)


def read_a_file_that_never_comes(job: RankJob, reporter: Reporter) -> None:
    reporter.change(is_away=True)
    time.sleep(job.limit_s)  # the demo kills it long before


def encode(encoder: torch.nn.Module, frames: int) -> Any:
    return encoder(
        audio_signal=torch.randn(2, nest.FEATURES, frames),
        length=torch.tensor([frames] * 2),
    )[0]


def grow(job: RankJob, reporter: Reporter) -> None:
    """Train without the length sync, with a batch that outgrows one rank's positional encoding;
    count wrong rows.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.limit_s))
    torch.manual_seed(0)
    encoder = _encoder_of(POSITIONS)
    model = DistributedDataParallel(encoder)
    for step in range(4):
        encoded = encode(
            model,
            LONG_BATCH if step == 1 and job.rank == job.slow_rank else SHORT_BATCH,
        )
        model.zero_grad()
        encoded.pow(2).mean().backward()
    rows = encoder.pos_enc.pe
    # A fresh one of that length.
    right = _encoder_of((rows.size(1) + 1) // 2).pos_enc.pe
    reporter.change(wrong_rows=int((rows != right).any(-1).sum()), rows=rows.size(1))


def _encoder_of(positions: int) -> Any:
    return ConformerEncoder(
        **nest.conformer(), pos_emb_max_len=positions, sync_max_audio_length=False
    )


def pretrain(job: RankJob, reporter: Reporter) -> None:
    """NEST pre-training under Lightning's DDP; one rank stalls once."""
    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.world_size,
        strategy="ddp",
        plugins=[LightningEnvironment()],  # also where a cluster's variables are set
        max_steps=TRAINING_STEPS,
        max_epochs=-1,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # each rank has data of its own
        callbacks=[reporter],
        **dict.fromkeys(off, False),
    )
    pl.seed_everything(0)
    model = nest.make(nest.model(job.folder, job.rank), trainer)

    def stall_before_the_encoder(*_: object) -> None:
        # In one step, in no evaluation.
        if job.rank == job.slow_rank and trainer.global_step == STALL_AFTER_STEPS:
            time.sleep(job.stall_s)

    model.encoder.register_forward_pre_hook(stall_before_the_encoder)
    reporter.time_calls_of(model.encoder)
    trainer.fit(model)
