"""Which batch a rank is at: what a thread's variables tell, under Lightning's own loops and in plain ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lhotse import CutSet
from lhotse.testing.dummies import dummy_cut
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from nemo_patches.stall import stacks
from nemo_patches.stall.last_batch import last_batch

pytestmark = pytest.mark.one_nemo
LIMIT_S = 60.0


@contextmanager
def running(work: Callable[[Callable[[], None]], object]) -> Iterator[Callable[[], str]]:
    """`work` in a thread, which is given a function that holds it; yields what is known of its batch when it is held.

    Each time that it is asked for, the thread then goes on.
    """
    holding, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        assert may_go_on.wait(LIMIT_S)
        may_go_on.clear()

    def known() -> str:
        assert holding.wait(LIMIT_S)
        text = last_batch(stacks.frames(thread.ident or 0))
        holding.clear()
        may_go_on.set()
        return text

    thread = threading.Thread(target=work, args=(hold,), daemon=True)
    thread.start()
    yield known
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@dataclass
class AudioBatch:
    audio: torch.Tensor
    sample_ids: list[str] | None = None


class Odd:
    @property
    def ids(self) -> list[str]:
        raise RuntimeError("a class of the user's")


CUTS = CutSet.from_cuts(dummy_cut(number) for number in range(6))
AUDIO = torch.zeros(2, 8)
BATCHES: dict[str, tuple[Any, str]] = {
    "NeMo's tuple": ((AUDIO, torch.ones(2), AUDIO, torch.ones(2)), ""),
    "with sample ids": ((AUDIO, torch.ones(2), AUDIO, torch.ones(2), torch.tensor([7, 9])), ": samples 7, 9"),
    "with cuts": (
        (AUDIO, torch.ones(2), AUDIO, torch.ones(2), CUTS),
        ": cuts dummy-mono-cut-0000, dummy-mono-cut-0001, dummy-mono-cut-0002, dummy-mono-cut-0003, +2",
    ),
    "lazy cuts": ((AUDIO, CUTS.repeat()), ""),
    "a dataclass": (AudioBatch(AUDIO, ["a", "b\x1b[31m"]), ": samples a, b?[31m"),
    "without ids": (AudioBatch(AUDIO), ""),
    "a dict": ({"audio": AUDIO, "ids": ("x", "y")}, ": samples x, y"),
    "on a device": ({"sample_id": torch.tensor([1, 2], device="meta")}, ""),
    "odd": (Odd(), ""),
    "none": (None, ""),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_a_step_is_given(name: str) -> None:
    batch, ids = BATCHES[name]

    def training_step(hold: Callable[[], None], batch: Any, batch_nb: int) -> None:
        hold()

    with running(lambda hold: training_step(hold, batch, 1041)) as known:
        assert known() == f"1041{ids}"


def test_a_script_and_a_loop_without_an_index() -> None:
    script = compile("for batch_idx, batch in enumerate([{'ids': ['a']}]):\n    hold()\n", "train.py", "exec")
    with running(lambda hold: exec(script, {"hold": hold})) as known:
        assert known() == "0: samples a"
    with running(lambda hold: [hold() for _ in range(1)]) as known:
        assert known() == ""


class Data(Dataset[torch.Tensor]):
    """Holds whoever asks for its element `held`."""

    def __init__(self, hold: Callable[[], None], held: int) -> None:
        self.hold, self.held = hold, held

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.held:
            self.hold()
        return torch.zeros(1)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:  # Lightning gives it no index
        loss: torch.Tensor = self.layer(batch).sum()
        loss.register_hook(self.in_backward)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        pass

    def in_backward(self, _: torch.Tensor) -> None:
        if self.global_step == 4:
            self.hold()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(hold: Callable[[], None]) -> None:
    model = Model()
    model.hold = hold
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, enable_model_summary=False, devices=1, **quiet)
    trainer.fit(model, DataLoader(Data(hold, 3)), DataLoader(Data(hold, 2)))


def test_lightnings_loops_know_the_last_batch_also_while_the_next_is_read() -> None:
    with running(fit) as known:
        assert known() == "2"  # reads the fourth
        assert known() == "4"  # in the fifth's backward
        assert known() == "1"  # validates: reads the third
