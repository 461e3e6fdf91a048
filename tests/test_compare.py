"""Parameters that part in silence, on real DDP and Lightning: who differs is named; healthy ranks never are."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from ranks import Said, free_port, join_group, run_ranks, wait_until
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import nemo_patches
from nemo_patches.uneven import parameter_watch as module
from nemo_patches.uneven.checksums import Checksums, parts
from nemo_patches.uneven.comparison import ComparisonCounters
from nemo_patches.uneven.parameter_watch import parameter_watch

pytestmark = pytest.mark.one_nemo
SIZE, EVERY = 3, 5
SKIPS_AT, CUT_OFF_S = 7, 0.3
HEALTHY = (
    "healthy",
    "many kinds of tensors",
    "two optimizers",
    "gradients in half precision",
    "accumulated",
    "some not in DDP",
    "a scaler that leaves a step out on all ranks",
    "a device that is behind",
    "Lightning",
    "Lightning, two optimizers",
)


class Seen(NamedTuple):
    lines: list[str]
    counters: list[ComparisonCounters]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    steps: int = 2 * EVERY,
    accumulate: int = 1,
    skips: Callable[[int], bool] = lambda step: False,
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """What is to be kept until its comparisons have come."""
    torch.manual_seed(100 + torch.distributed.get_rank())
    for step in range(1, steps + 1):
        for part in range(accumulate):
            with contextlib.nullcontext() if part == accumulate - 1 else wrapped.no_sync():
                loss = wrapped(torch.randn(6, 4)).square().mean()
                (loss if scaler is None else scaler.scale(loss * (math.inf if step == SKIPS_AT else 1.0))).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif not skips(step):
            optimizer.step()
        optimizer.zero_grad()
    return wrapped, optimizer


def adam(wrapped: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(wrapped.parameters(), lr=0.01)


class Mixed(nn.Module):
    """A frozen parameter, one that is not contiguous, one without elements, of other types, and one of many parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = model()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.empty = nn.Parameter(torch.zeros(0))
        self.of_64_bits = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.of_16_bits = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.pairs = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.large = nn.Parameter(torch.randn((1 << 20) + 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rest = (self.last, self.empty, self.of_64_bits, self.of_16_bits, self.pairs.abs(), self.large)
        return self.inner(batch) * (1 + sum(one.float().square().mean() if one.numel() else one.sum() for one in rest))


class Small(pl.LightningModule):
    def __init__(self, skips_at: int = -1) -> None:
        super().__init__()
        self.inner, self.skips_at = model(), skips_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.inner(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.inner(batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx == self.skips_at:
            closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_optimizers(self) -> Any:
        return adam(self)


class Adversarial(Small):
    """Steps one optimizer in each batch, and another in every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.automatic_optimization = model(), False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, part in zip(self.optimizers(), (self.inner, self.other), strict=True):
            if part is self.inner or batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(part(batch).square().mean() + 0.0 * sum(one.sum() for one in self.parameters()))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return adam(self.inner), adam(self.other)


class Behind(Checksums):
    """As on a GPU that has not come so far when they are enqueued, nor at the next steps."""

    STEPS, looks = 3, 0

    def are_done(self) -> bool:
        self.looks += 1
        return self.looks > self.STEPS


class Odd(torch.optim.Optimizer):
    """Its steps do nothing, and what it says of its parameters is nonsense."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.param_groups = [{"params": None}]

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def fit(module: Small, **options: Any) -> Any:
    torch.manual_seed(100 + torch.distributed.get_rank())
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    data = torch.utils.data.DataLoader(torch.randn(600, 4), batch_size=2)
    defaults = {"max_epochs": 1, "limit_train_batches": 20, "limit_val_batches": 2, "val_check_interval": 7}
    trainer = pl.Trainer(
        accelerator="cpu", devices=SIZE, strategy="ddp", **{**dict.fromkeys(off, False), **defaults, **options}
    )
    trainer.fit(module, data, data)
    return trainer


def scenarios(rank: int) -> Iterator[tuple[str, Any]]:
    """Each trains, and gives what is to be kept until its comparisons have come."""
    yield "healthy", train(wrapped := DDP(model()), adam(wrapped), steps=60)
    yield "many kinds of tensors", train(wrapped := DDP(Mixed()), torch.optim.SGD(wrapped.parameters(), lr=1e-3))
    first, second = DDP(model()), DDP(model())
    yield "two optimizers", [train(first, adam(first)), train(second, torch.optim.SGD(second.parameters(), lr=0.1))]
    (wrapped := DDP(model())).register_comm_hook(None, default_hooks.fp16_compress_hook)
    yield "gradients in half precision", train(wrapped, adam(wrapped))
    yield "accumulated", train(wrapped := DDP(model()), adam(wrapped), accumulate=3)
    nemo_patches.apply(compare=1, stall_timeout=0)
    yield "every step", train(wrapped := DDP(model()), adam(wrapped))
    nemo_patches.apply(compare=EVERY, stall_timeout=0)
    some = torch.optim.SGD([*(wrapped := DDP(model())).parameters(), nn.Parameter(torch.full((2,), float(rank)))], 0.1)
    yield "some not in DDP", train(wrapped, some)
    scaled = train(wrapped := DDP(model()), adam(wrapped), scaler=torch.amp.GradScaler("cpu"), steps=2 * EVERY + 1)
    yield "a scaler that leaves a step out on all ranks", scaled
    module.Checksums = Behind  # type: ignore[misc]
    yield "a device that is behind", train(wrapped := DDP(model()), adam(wrapped), steps=2 * EVERY + Behind.STEPS)
    module.Checksums = Checksums  # type: ignore[misc]
    yield "Lightning", fit(Small())
    yield "Lightning, two optimizers", fit(Adversarial())

    optimizer = adam(wrapped := DDP(model()))
    train(wrapped, optimizer, EVERY)
    yield "skipped", train(wrapped, optimizer, 2 * EVERY, skips=lambda step: rank == 1 and step == 2)
    wrapped = DDP(model())
    yield "another rate", train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.02 if rank == 2 else 0.01))
    wrapped = DDP(model())
    yield "three rates", train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01 * (rank + 1)))
    optimizer = adam(wrapped := DDP(model()))
    train(wrapped, optimizer, 2)
    if rank == 0:  # two rows change places, and nothing else
        with torch.no_grad():
            wrapped.module[3].weight.copy_(wrapped.module[3].weight.flip(0))
    yield "rows that changed places", train(wrapped, optimizer, 2 * EVERY)
    wrapped = DDP(part := model().requires_grad_(False).append(nn.Linear(2, 2)))
    optimizer = adam(wrapped)
    train(wrapped, optimizer, EVERY)
    part[3].requires_grad_(True)  # DDP does not synchronize its gradients
    yield "unfrozen", train(wrapped, optimizer)
    yield "Lightning, skipped", fit(Small(skips_at=SKIPS_AT if rank == 1 else -1), limit_train_batches=21)
    accumulate = 4 if rank == 1 else 3
    yield (
        "Lightning, accumulated",
        fit(
            Small(),
            accumulate_grad_batches=accumulate,
            max_steps=2 * EVERY,
            limit_train_batches=100,
            limit_val_batches=0,
        ),
    )

    yield "without DDP", train(alone := model(), adam(alone))
    wrapped = DDP(model())
    optimizer = adam(wrapped)
    with wrapped.no_sync():
        train(wrapped, optimizer, 3)
    yield "local steps", train(wrapped, optimizer)
    wrapped = DDP(model())
    state = post_localSGD_hook.PostLocalSGDState(None, torch.distributed.new_subgroups(1)[0], start_localSGD_iter=2)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    yield "local SGD", train(wrapped, adam(wrapped))
    wrapped = DDP(model())
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    yield "ZeRO", train(wrapped, zero)
    from torch.distributed.fsdp import fully_shard

    yield "sharded", train(shards := fully_shard(model()[:1]), adam(shards))
    if rank == 2:
        nemo_patches.apply(compare=0, stall_timeout=0)
    wrapped = DDP(model())
    nemo_patches.apply(compare=EVERY, stall_timeout=0)
    yield "made too early on one rank", train(wrapped, adam(wrapped))


def run(rank: int, size: int, port: int) -> dict[str, Seen]:
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    said, seen, known = Said(), dict[str, Seen](), set[str]()
    nemo_patches.apply(compare=EVERY, stall_timeout=0)
    gc.freeze()  # else each collection goes through all of NeMo

    def has_come(one: ComparisonCounters) -> bool:
        return bool(one.found) or one.equal_at > one.steps - EVERY

    for name, kept in scenarios(rank):
        wait_until(lambda: all(map(has_come, parameter_watch.counters())))
        torch.distributed.barrier()
        new = [one for one in parameter_watch.counters() if one.optimizer not in known]
        known |= {one.optimizer for one in new}
        seen[name] = Seen(list(said.lines), new)
        said.lines.clear()
        del kept
        gc.collect()  # which ends the comparisons: there are 16 at once, no more

    kept = train(wrapped := DDP(model()), Odd(wrapped.parameters()))
    seen["an error of ours"] = Seen(list(said.lines), list(parameter_watch.counters()))
    said.lines.clear()
    nemo_patches.apply(compare=0 if rank == 1 else EVERY, timeout=CUT_OFF_S, stall_timeout=0)
    kept = train(wrapped := DDP(model()), adam(wrapped), steps=12 * EVERY)
    wait_until(lambda: rank == 1 or said.lines)
    torch.distributed.barrier()
    seen["one rank does not compare"] = Seen(list(said.lines), list(parameter_watch.counters()))
    said.lines.clear()
    torch.distributed.destroy_process_group()
    join_group(rank, size, port)
    nemo_patches.apply(timeout=CUT_OFF_S, compare=1, stall_timeout=0)
    if rank == 2:
        nemo_patches.revert()
    kept = train(wrapped := DDP(model()), adam(wrapped))
    wait_until(lambda: rank == 2 or said.lines)
    torch.distributed.barrier()
    seen["one rank without"] = Seen(list(said.lines), list(parameter_watch.counters()))
    nemo_patches.revert()
    optimizer = adam(kept[0])
    optimizer.step()
    seen["reverted"] = Seen([], list(parameter_watch.counters()))
    logging.getLogger("nemo_patches").removeHandler(said)
    return seen


@pytest.fixture(scope="module")
def results() -> list[dict[str, Seen]]:
    return [result.value for result in run_ranks(run, SIZE, free_port())]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_ranks_are_compared_and_not_a_word_is_said(results: list[dict[str, Seen]], name: str) -> None:
    for seen in results:
        assert seen[name].lines == []
        assert all(one.equal_at == one.steps // EVERY * EVERY > 0 for one in seen[name].counters)
        assert all(one.compared == one.steps // EVERY for one in seen[name].counters)
    if name == "healthy":
        assert str(results[1][name].counters[0]) == "AdamW: 60 steps, 12 comparisons; equal on all ranks after step 60"
    if "two" in name:
        assert len(results[0][name].counters) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "skipped",
            "after optimizer step 10 (AdamW, optimizer 14) the parameters of rank 1 differ from those of the "
            "other 2 ranks, first in 0.weight. Training goes on; they were equal after step 5",
        ),
        ("another rate", "after optimizer step 5 (SGD, optimizer 15) the parameters of rank 2 differ"),
        (
            "three rates",
            "differ between rank 0 and rank 1 and rank 2, first in 0.weight. Training goes on; compare the "
            "configs of the ranks. Which are wrong cannot be told",
        ),
        (
            "rows that changed places",
            "the parameters of rank 0 differ from those of the other 2 ranks, first in 3.weight",
        ),
        (
            "unfrozen",
            "after optimizer step 10 (AdamW, optimizer 18) the parameters differ between rank 0 and rank 1 and",
        ),
        (
            "Lightning, skipped",
            "after optimizer step 10 (AdamW, optimizer 19) the parameters of rank 1 differ from those "
            "of the other 2 ranks, first in inner.0.weight; the ranks have taken different numbers of training batches "
            "(10 on ranks 0, 2; 11 on rank 1). Training goes on; they were equal after step 5",
        ),
        (
            "Lightning, accumulated",
            "after optimizer step 5 (AdamW, optimizer 20) the parameters are equal, but the ranks "
            "have taken different numbers of training batches (15 on ranks 0, 2; 20 on rank 1)",
        ),
    ],
)
def test_who_differs_is_named_once_with_the_step(results: list[dict[str, Seen]], name: str, words: str) -> None:
    (line,) = results[0][name].lines
    assert words in line
    assert all(seen[name].lines == [] for seen in results[1:])
    assert all(seen[name].counters[-1].found in line for seen in results)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without DDP", "no DistributedDataParallel over all ranks that was made since apply() has them"),
        ("local steps", "a step came after a forward under no_sync, as in local SGD"),
        ("local SGD", "DDP has a communication hook, torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"),
        ("ZeRO", "the ranks' optimizers have different ones, by name or shape (rank 0; rank 1; rank 2)"),
        ("sharded", "they are sharded, or replicated by other means than DDP (DTensor: FSDP2"),
        ("made too early on one rank", "parameters are not compared: rank 2 cannot, and says why"),
    ],
)
def test_parameters_that_need_not_be_equal_are_not_compared(
    results: list[dict[str, Seen]], name: str, words: str
) -> None:
    (line,) = results[0][name].lines
    assert words in line
    assert results[1][name].lines == []
    assert all(seen[name].counters[0].equal_at == 0 for seen in results)
    if name == "ZeRO":  # after its step all ranks have all parameters again
        assert [one.equal_at for one in results[0][name].counters] == [0, 2 * EVERY]
    (reason,) = results[2][name].lines or [""]
    assert ("made since apply()" in reason) == (name == "made too early on one rank")


@pytest.mark.parametrize(
    ("name", "without", "words"),
    [
        ("one rank does not compare", 1, "one is late, makes no such steps, or does not compare"),
        # The roll call may have found out by then which one it is.
        ("one rank without", 2, "(not every rank is connected: one is|rank 2:) not patched, or not started"),
    ],
)
def test_a_rank_that_does_not_answer_is_said_once(
    results: list[dict[str, Seen]], name: str, without: int, words: str
) -> None:
    for rank, seen in enumerate(results):
        lines = seen[name].lines
        assert len(lines) == (rank != without)
        assert all(re.search(words, line) and "are not compared yet" in line for line in lines)


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_is_of_every_bit_and_every_place_and_changes_none(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).remainder(5).to(dtype).reshape(3, 4)
    before, numbers = tensor.clone(), Checksums([tensor]).numbers()
    assert torch.equal(tensor, before)
    assert Checksums([before]).numbers() == numbers
    assert Checksums([tensor.t().contiguous().t()]).numbers() == numbers  # in another order in memory
    for one, other in ((0, 1), (0, 4), (2, 11)):
        swapped = tensor.clone().view(-1)
        swapped[[one, other]] = swapped[[other, one]]
        assert (Checksums([swapped]).numbers() == numbers) == bool(swapped[one] == swapped[other])
    raw = torch.view_as_real(tensor) if dtype.is_complex else tensor
    for byte in range(0 if dtype == torch.bool else raw.element_size()):
        flipped = raw.clone()
        flipped.view(torch.uint8)[1, 1] ^= 1 << byte
        assert Checksums([flipped]).numbers() != numbers


def test_a_large_tensor_has_a_number_for_each_part() -> None:
    large = torch.zeros((1 << 21) + 1)
    numbers = Checksums([torch.ones(2), large, torch.zeros(0)]).numbers()
    assert len(numbers) == 4 == 1 + parts(large)
    large[1 << 20] = 1.0
    changed = Checksums([torch.ones(2), large, torch.zeros(0)]).numbers()
    assert [one != other for one, other in zip(numbers, changed, strict=True)] == [False, False, True, False]


def test_not_a_number_and_the_sign_of_zero_are_bits_as_others() -> None:
    assert Checksums([torch.tensor([math.nan])]).numbers() == Checksums([torch.tensor([math.nan])]).numbers()
    assert Checksums([torch.tensor([0.0])]).numbers() != Checksums([torch.tensor([-0.0])]).numbers()


PROGRAM = """
import datetime, os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
from nemo_patches.stall import subscriber
from nemo_patches.sync import length_sync
from nemo_patches.uneven.parameter_watch import parameter_watch

rank, port = int(sys.argv[1]), sys.argv[2]
subscriber.subscribe()
if rank == 0:
    parameter_watch.use(1)
address = f"tcp://127.0.0.1:{port}"
torch.distributed.init_process_group("gloo", address, datetime.timedelta(seconds=120), world_size=2, rank=rank)
wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
compiled = torch.compile(optimizer.step, backend="eager") if rank == 0 else optimizer.step
for step in (optimizer.step, optimizer.step, compiled):
    wrapped(torch.ones(1, 2)).sum().backward()
    step()
    parameter_watch.batch_began()
torch.distributed.barrier()
print([one.compared for one in parameter_watch.counters()])  # and it ends, where the other rank never answers
"""


def test_compiled_steps_are_said_to_be_unseen_and_a_process_ends_while_it_compares() -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), port], stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["[1]\n", "[]\n"]
    (line,) = [line for line in outputs[0][1].splitlines() if " nemo_patches " in line]
    assert "parameters are not compared after an optimizer's steps that are compiled (torch.compile of the" in line


def test_an_error_of_ours_ends_the_comparison_and_no_training(results: list[dict[str, Seen]]) -> None:
    for seen in results:
        (line,) = seen["an error of ours"].lines
        assert "the comparison of parameters has ended by an error of its own, please report it: TypeError" in line
        assert seen["an error of ours"].counters == []
        assert seen["reverted"].counters == []


def test_every_step_can_be_compared(results: list[dict[str, Seen]]) -> None:
    for seen in results:
        assert seen["every step"].lines == []
        (one,) = seen["every step"].counters
        assert one.compared + one.left_out >= one.equal_at > 0
