"""What the hangs' jobs are made of: a rank, its process group, and a small Lightning trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from nemo_patches.tools.demo.jobs import Job

GROUP_TIMEOUT = timedelta(minutes=30)  # Lightning's default


@dataclass(frozen=True)
class Rank:
    """Of a hang's job; the folder is all ranks'."""

    job: Job

    @property
    def number(self) -> int:
        return self.job.rank

    @property
    def size(self) -> int:
        return self.job.world_size

    @property
    def folder(self) -> Path:
        return self.job.folder

    def join(self) -> None:
        """For a job that Lightning does not make the group of."""
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)

    def trainer(self, **settings: Any) -> Any:
        """Under DDP, of the ranks that are there."""
        return pl.Trainer(
            accelerator="cpu",
            devices=self.size,
            strategy=settings.pop("strategy", "ddp"),
            plugins=[LightningEnvironment()],  # the ranks are already started, also where a cluster's variables are set
            use_distributed_sampler=False,
            **{
                "max_epochs": 1,
                "num_sanity_val_steps": 0,
                "limit_val_batches": 0,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **settings,
            },
        )

    def read_audio(self) -> None:
        """From a mount that does not answer: a FIFO that nobody writes to."""
        fifo = self.folder / f"audio_{self.number}.wav"
        os.mkfifo(fifo)
        read(fifo)


def read(audio: Path) -> bytes:
    return audio.read_bytes()
