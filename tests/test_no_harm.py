"""What a rank computes, its random states and what it keeps are as in stock, with the watch at its
smallest timeouts.

Small programs drawn by chance: real functions with variables of their own, run once without
nemo_patches' watch and once with it, on every rank.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreters import python
from ranks import run_ranks, stall_monitor, wait_until

import nemo_patches
from nemo_patches.sync import rank_log
from nemo_patches.watch import subscriber

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STEPS = 50
PAUSE_S = 0.004
STALL_TIMEOUT = 0.004  # so that nearly every look is at the stack

# A program is a function with some of these in its loop. `told` takes what it computes.
STATEMENTS = (
    (
        "big = torch.zeros(250_000); seen = weakref.ref(big); pause(); big = None;"
        " told(seen() is None)"
    ),
    (
        "kept = [Tracked() for _ in range(3)]; alive = weakref.WeakSet(kept); pause();"
        " kept = 0; told(len(alive))"
    ),
    (
        "lr = 1.0; scope = locals(); exec(HALVE, {'pause': pause}, scope);"
        " told(scope['lr'])"
    ),
    "here = locals(); later = step; pause(); told(here.get('later') == step)",
    "names = [(pause(), name)[1] for name in locals()]; told(len(names))",
    (
        "told(random.random()); told(float(numpy.random.rand()));"
        " told(float(torch.rand(1)))"
    ),
    "batch = Lazy(); batch_idx = step; pause(); told(batch.reads)",
    "batch = LazyDict(ids=1); batch_idx = step; pause(); told(batch.reads)",
    "told(sum(value for value in numbers(step)))",
    "class Own:\n            it = step\n            pause()\n        told(Own.it)",
    "dist.all_reduce(total); told(float(total.clamp_(max=1e6)))",
    "pause()",
)
HALVE = "for _ in range(3): lr = lr * 0.5; pause()"
SOURCE = """
import weakref

def main(told, pause):
    total = torch.ones(1)
    for step in range({steps}):
        {body}
    told(sorted(vars()))
"""


class Tracked:
    """What a weak reference may be to."""


class Lazy:
    """A batch that computes on read, and draws for it."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def ids(self) -> float:
        self.reads += 1
        return random.random()

    def __getattr__(self, name: str) -> Any:
        self.reads += 1
        raise AttributeError(name)


class LazyDict(dict[str, int]):
    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


def numbers(first: int) -> Any:
    for number in range(first, first + 3):
        time.sleep(PAUSE_S / 4)
        yield number


def pause() -> None:
    """Longer than the watch takes from one look to the next."""
    time.sleep(PAUSE_S)


def compiled(statements: tuple[str, ...]) -> Callable[..., None]:
    names: dict[str, Any] = {**globals()}
    source = SOURCE.format(steps=STEPS, body="\n        ".join(statements))
    exec(compile(source, "/my/train.py", "exec"), names)
    main: Callable[..., None] = names["main"]
    return main


def states() -> str:
    """Of all that draws random numbers."""
    found = (
        random.getstate(),
        numpy.random.get_state(),
        torch.get_rng_state().tolist(),
    )
    return hashlib.sha256(pickle.dumps(found)).hexdigest()


def recorded(main: Callable[..., None], rank: int) -> list[Any]:
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    record: list[Any] = []
    main(record.append, pause)
    return [*record, states()]


def stock_and_watched(
    rank: int, size: int, programs: list[tuple[str, ...]]
) -> list[tuple[list[Any], list[Any]]]:
    """Of each program, the two records; how often the watch has looked is checked here."""
    mains = [compiled(program) for program in programs]
    stock = [recorded(main, rank) for main in mains]
    rank_log.logger.setLevel(logging.CRITICAL)  # a line at every step
    nemo_patches.apply(stall_timeout=STALL_TIMEOUT)
    wait_until(
        lambda: subscriber.monitor() is not None and stall_monitor().exchange.is_whole
    )
    dist.barrier()
    looks: list[float] = []
    progress = stall_monitor().progress
    original = progress._look_at_work
    progress._look_at_work = lambda *when: (
        looks.append(when[0]),
        original(*when),
    )
    watched = [recorded(main, rank) for main in mains]
    assert len(looks) > 10, "the watch has not looked"
    return list(zip(stock, watched, strict=True))


PROGRAMS = st.lists(
    st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4).map(tuple),
    min_size=10,
    max_size=10,
)


@settings(max_examples=1, phases=[Phase.generate])  # a run takes long
@given(PROGRAMS)
def test_a_rank_computes_draws_and_keeps_what_it_does_in_stock(
    programs: list[tuple[str, ...]],
) -> None:
    every = [(statement, "pause()") for statement in STATEMENTS]
    for result in run_ranks(stock_and_watched, 2, [*programs, *every], limit=280):
        for program, (stock, watched) in zip(
            [*programs, *every], result.value, strict=True
        ):
            assert watched == stock, program


# Functions whose frames differ in size; of an own thread, since the watch's looks are at others'.
LOOKED_AT = '''
import gc
import sys
import threading
import time

from nemo_patches.watch import stacks
from nemo_patches.watch.training_notes import TrainingNotes
from nemo_patches.watch.training_thread import TrainingThread


class Garbage:
    """Of a cycle; while it is collected other threads run."""

    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0.0005)


for number in range(40):
    names = ", ".join(f"v{i}=object" for i in range(number))
    exec(
        f"def f{number}(depth, {names}):"
        f" return depth and functions[(depth * 7 + {number}) % 40](depth - 1)"
    )
functions = [globals()[f"f{number}"] for number in range(40)]


def train():
    while not over.is_set():
        assert gc.isenabled()
        for depth in range(5, 60):
            functions[depth % 40](depth)


over = threading.Event()
training = threading.Thread(target=train, daemon=True)
training.start()
gc.set_threshold(20)
sys.setswitchinterval(1e-4)
for look in range(400):
    Garbage()
    stacks.where(training.ident)
    TrainingThread(TrainingNotes()).look(0.0, look)
assert training.is_alive()
over.set()
training.join()
gc.collect()
gc.disable()
stacks.where(threading.get_ident())
TrainingThread(TrainingNotes()).look(0.0, 0)
TrainingThread(TrainingNotes()).known()
assert gc.collect() == 0  # else functions' variables are kept until then
'''


def test_a_look_at_a_thread_that_runs_ends_no_process_and_keeps_nothing() -> None:
    """Python 3.11 makes the frames' objects then, and a garbage collection lets the thread go on."""
    done = python("-c", LOOKED_AT)
    assert (done.returncode, done.stderr) == (0, "")
