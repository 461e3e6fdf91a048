"""What one rank of a hang's job does: the scenario; and it tells the parent where it stands still."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from group import RANKS, Rank

import nemo_patches
from nemo_patches.tools.demo import job_logs

STALL_TIMEOUT_S = 4.0
LIMIT_S = 120  # for what takes 5 to 15 s
STANDS_AFTER_S, LOOK_EVERY_S = 3.0, 0.25
RUNS_S = 0.02  # CPU time between two looks; a thread that has used more moves


@dataclass(frozen=True)
class Stands:
    """The training thread has not run for a while. collective: the one that it waits in, or empty."""

    where: str
    collective: str


@dataclass(frozen=True)
class Ended:
    """error: short; empty where the scenario came to its end."""

    error: str


def play(rank: Rank, events: Connection) -> None:
    """Run the scenario to its end, if it has one. Sends Stands, None where it moves again, and
    Ended.
    """
    os.setpgid(0, 0)  # with its data loader's workers, which end with it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's, as it may wait in C++
    signal.alarm(LIMIT_S + 10)  # the parent, if it is there, ends it at the limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file where stock aborts
    job_logs.write_to(rank.log)
    faulthandler.enable()  # seen once: forked-lock's rank 0 ended by SIGSEGV, at a load of 30
    number, size = str(rank.number), str(RANKS)
    os.environ.update(
        RANK=number,
        LOCAL_RANK=number,
        NODE_RANK="0",
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rank.port))
    try:
        _run(rank, events)
    except Exception as error:
        traceback.print_exc()
        events.send(Ended(str(error).partition("\n")[0]))
        sys.exit(1)
    events.send(Ended(""))


def _run(rank: Rank, events: Connection) -> None:
    import torch
    from nemo.utils import logging as nemo_logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    nemo_logging.setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if rank.patched:
        timeouts = {"timeout": 1.0, "stall_timeout": STALL_TIMEOUT_S}
        settings: dict[str, Any] = {**timeouts, **rank.hang.settings}
        nemo_patches.apply(**settings)
    else:
        nemo_patches.revert()  # the user may have auto-apply on, and stock must be stock
    run = getattr(importlib.import_module(rank.hang.module), rank.hang.function)
    with _watched(events):
        run(rank)


@contextlib.contextmanager
def _watched(events: Connection) -> Iterator[None]:
    over = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(threading.get_ident(), events, over), daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()  # the pipe is the training thread's again


def _watch(thread: int, events: Connection, over: threading.Event) -> None:
    from nemo_patches.watch.frames import stack

    clock = time.pthread_getcpuclockid(thread)
    place = list[tuple[CodeType, int | None]]()
    ran_s = 0.0
    since = time.monotonic()
    stands = False
    while not over.wait(LOOK_EVERY_S):
        now_at = stack(thread)
        now_ran_s = time.clock_gettime(clock)
        if now_at != place or now_ran_s - ran_s > RUNS_S:
            place = now_at
            since = time.monotonic()
            if stands:
                stands = False
                events.send(None)
        elif not stands and time.monotonic() - since > STANDS_AFTER_S:
            stands = True
            events.send(_standing(thread))
        ran_s = now_ran_s


def _standing(thread: int) -> Stands:
    from nemo_patches.watch import stacks

    found = stacks.occupation(thread)
    if not found.collective:
        return Stands(stacks.where(thread).partition(" < ")[0], "")
    during = f", during {found.hook}" if found.hook else ""
    return Stands(f"{found.collective}, in {found.caller}{during}", found.collective)
