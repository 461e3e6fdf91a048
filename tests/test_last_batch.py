"""Which batch a rank is at, as Lightning's own loops tell; and that nothing of the user's is run to
know it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lhotse import CutSet
from lhotse.testing.dummies import dummy_cut
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from nemo_patches.patching.running_trainer import RunningTrainer
from nemo_patches.watch import subscriber

pytestmark = pytest.mark.one_nemo
LIMIT_S = 60.0


class Held:
    """A thread that is held at some points, where it is asked what is known of its batch; each time
    it then goes on.
    """

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()

    def hold(self) -> None:
        self.is_held.set()
        assert self.may_go_on.wait(LIMIT_S)
        self.may_go_on.clear()

    def known(self) -> str:
        assert self.is_held.wait(LIMIT_S)
        text = subscriber.process._notes.batch()
        self.is_held.clear()
        self.may_go_on.set()
        return text


@contextmanager
def running(work: Callable[[Held], object]) -> Iterator[Held]:
    held = Held()
    thread = threading.Thread(target=work, args=(held,), daemon=True)
    thread.start()
    yield held
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def trainer(**settings: Any) -> Trainer:
    quiet = dict.fromkeys(
        (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        ),
        False,
    )
    return Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=[RunningTrainer()],
        **quiet,
        **settings,
    )


class Reads:
    """How often anything of a class of the user's was run."""

    count = 0


class Counting:
    """It computes on read."""

    @property
    def ids(self) -> list[str]:
        Reads.count += 1
        return [str(random.random())]

    sample_ids = ids

    def __getattribute__(self, name: str) -> Any:
        Reads.count += 1
        return super().__getattribute__(name)

    def __len__(self) -> int:
        Reads.count += 1
        return 4


class CountingDict(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        Reads.count += 1
        return super().get(key, default)

    __getitem__ = __missing__ = get


class CountingTuple(tuple[Any, ...]):
    @property
    def _fields(self) -> tuple[str, ...]:
        Reads.count += 1
        return ("ids",)

    def __getitem__(self, key: Any) -> Any:
        Reads.count += 1
        return super().__getitem__(key)


class CountingText(str):
    def __str__(self) -> str:
        Reads.count += 1
        return "read"

    __format__ = __repr__ = __str__  # type: ignore[assignment]


@dataclass
class AudioBatch:
    audio: torch.Tensor
    sample_ids: list[str] | None = None


class Named(NamedTuple):
    audio: torch.Tensor
    ids: list[int]


CUTS = CutSet.from_cuts(dummy_cut(number) for number in range(6)).to_eager()
AUDIO = torch.zeros(2, 8)
FOUR = (AUDIO, torch.ones(2), AUDIO, torch.ones(2))
BATCHES: dict[str, tuple[Any, str]] = {
    "NeMo's tuple": (FOUR, ""),
    "with sample ids": ((*FOUR, torch.tensor([7, 9])), ": samples 7, 9"),
    "with many": ((*FOUR, torch.arange(9)), ": samples 0, 1, 2, 3, +5"),
    "with cuts": (
        (*FOUR, CUTS),
        (
            ": cuts dummy-mono-cut-0000, dummy-mono-cut-0001, dummy-mono-cut-0002,"
            " dummy-mono-cut-0003, +2"
        ),
    ),
    "lazy cuts": ((AUDIO, CUTS.repeat()), ""),
    "a dataclass": (AudioBatch(AUDIO, ["a", "b\x1b[31m"]), ": samples a, b?[31m"),
    "without ids": (AudioBatch(AUDIO), ""),
    "a dict": ({"audio": AUDIO, "ids": ("x", "y")}, ": samples x, y"),
    "a named tuple": (Named(AUDIO, [3]), ": samples 3"),
    "on a device": ({"sample_id": torch.tensor([1, 2], device="meta")}, ""),
    "computes on read": (Counting(), ""),
    "a dict of the user's": (CountingDict(ids=["a"]), ""),
    "a tuple of the user's": (CountingTuple([["a"]]), ""),
    "texts of the user's": ({"ids": [CountingText("a")]}, ""),
}


class Items(Dataset[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Untouched(LightningModule):
    """Each batch comes to its step as it is, and is held there."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held
        self.automatic_optimization = False

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch

    def training_step(self, batch: Any) -> None:  # Lightning gives it no index
        self.held.hold()

    def configure_optimizers(self) -> None:
        return None


def test_what_a_step_is_given_and_that_nothing_of_the_users_is_run() -> None:
    def fit(held: Held) -> None:
        items = DataLoader(
            Items([batch for batch, _ in BATCHES.values()]),
            batch_size=None,
            collate_fn=lambda one: one,
        )
        trainer(limit_val_batches=0).fit(Untouched(held), items)

    with running(fit) as held:
        for index, (name, (_, ids)) in enumerate(BATCHES.items()):
            assert held.is_held.wait(LIMIT_S)
            before = Reads.count, random.getstate()
            assert (name, held.known()) == (name, f"{index} of epoch 0 (train){ids}")
            assert (Reads.count, random.getstate()) == before, name


class Data(Dataset[torch.Tensor]):
    """Holds whoever asks for its element `at`."""

    def __init__(self, held: Held, at: int) -> None:
        self.held = held
        self.at = at

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.held.hold()
        return torch.zeros(1)


class Model(LightningModule):
    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        loss.register_hook(self.in_backward)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        pass

    def in_backward(self, _: torch.Tensor) -> None:
        if self.global_step == 4:
            self.held.hold()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(held: Held) -> None:
    trainer(num_sanity_val_steps=0).fit(
        Model(held), DataLoader(Data(held, 3)), DataLoader(Data(held, 2))
    )


def test_lightnings_loops_know_the_last_batch_also_while_the_next_is_read() -> None:
    with running(fit) as held:
        assert held.known() == "2 of epoch 0 (train)"  # reads the fourth
        assert held.known() == "4 of epoch 0 (train)"  # in the fifth's backward
        assert held.known() == "1 of epoch 0 (validate)"  # reads the third
    # The trainer has gone, or does nothing.
    assert subscriber.process._notes.batch() == ""
