"""A rank of a hang's job: its process group, and its Lightning trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_patches.tools.demo.jobs import RankJob
from nemo_patches.tools.demo.training import cpu_trainer

GROUP_TIMEOUT = timedelta(minutes=30)  # Lightning's default


@dataclass(frozen=True)
class Rank:
    """One of the ranks. Its folder is that of all."""

    job: RankJob

    @property
    def number(self) -> int:
        return self.job.rank

    @property
    def folder(self) -> Path:
        return self.job.folder

    def join(self) -> None:
        """Make the process group, for a job without Lightning."""
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)

    def trainer(self, **settings: Any) -> Any:
        """For one epoch of training, unless the settings say otherwise."""
        return cpu_trainer(self.job.world_size, **{"max_epochs": 1, "limit_val_batches": 0, **settings})

    def read_audio(self) -> None:
        """From a mount that does not answer: a FIFO that nobody writes to."""
        fifo = self.folder / f"audio_{self.number}.wav"
        os.mkfifo(fifo)
        read(fifo)


def read(audio: Path) -> bytes:
    return audio.read_bytes()
