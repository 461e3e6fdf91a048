"""A rank of a hang's job: its process group, its Lightning trainer, and a file that never comes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gallery import Hang

RANKS = 2
GROUP_TIMEOUT = timedelta(minutes=30)  # Lightning's default


@dataclass(frozen=True)
class Rank:
    """One of the ranks. folder: that of all; the logs go there, too."""

    hang: Hang
    patched: bool
    number: int
    port: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.number}.log"

    def join(self) -> None:
        """Make the process group, for a job without Lightning."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)

    def trainer(self, **settings: Any) -> Any:
        """For one epoch of training under DDP, unless the settings say otherwise; it logs, saves
        and shows nothing.
        """
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.environments import LightningEnvironment

        off = (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        )
        quiet = dict.fromkeys((*off, "use_distributed_sampler"), False)
        one_epoch = {"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
        environment = LightningEnvironment()  # also where a cluster's variables are set
        of_ranks = {
            "accelerator": "cpu",
            "devices": RANKS,
            "strategy": "ddp",
            "plugins": [environment],
        }
        return pl.Trainer(**{**of_ranks, **quiet, **one_epoch, **settings})

    def read_audio(self) -> None:
        """From a mount that does not answer: a FIFO that nobody writes to."""
        fifo = self.folder / f"audio_{self.number}.wav"
        os.mkfifo(fifo)
        read(fifo)


def read(audio: Path) -> bytes:
    return audio.read_bytes()
