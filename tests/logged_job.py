"""A rank of a small job under torchrun, of which rank 1 fails as HOW says; nothing of nemo_patches
is in it.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import hydra
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

HOW = os.environ["HOW"]
RANK = int(os.environ["RANK"])
_AT = 20  # the sample


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if RANK == 1 and index == _AT:
            if HOW == "reset":
                raise ConnectionResetError(104, "Connection reset by peer")
            return torch.zeros(3 if HOW == "sizes" else 2)
        return torch.zeros(2)


def train() -> None:
    if RANK == 1 and HOW == "early":
        raise FileNotFoundError(2, "No such file or directory", "/数据/训练.json")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    loader = DataLoader(
        Samples(),
        batch_size=4,
        num_workers=1,
        collate_fn=lambda rows: torch.stack([*rows]),
    )
    for number, batch in enumerate(loader):
        if RANK == 1 and HOW == "kill" and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 1 and HOW in ("term", "leave") and number == 5:
            os.kill(os.getpid(), signal.SIGTERM) if HOW == "term" else os._exit(3)
        dist.all_reduce(batch.sum())


@hydra.main(version_base=None, config_path=None)
def under_hydra(_: object) -> None:
    train()


if __name__ == "__main__":
    if os.environ.get("HYDRA"):
        sys.argv[1:] = [f"hydra.run.dir={os.environ['HYDRA']}"]
        under_hydra()
    else:
        train()
