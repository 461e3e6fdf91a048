"""One rank of a hang's job: runs the scenario, and tells the parent where it stands still."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType

from nemo.utils import logging as nemo_logging

from nemo_patches.stall import stacks
from nemo_patches.tools.demo.hangs.gallery import Hang
from nemo_patches.tools.demo.hangs.group import Rank
from nemo_patches.tools.demo.jobs import Notice, RankJob, Stands

STANDS_AFTER_S, LOOK_EVERY_S = 3.0, 0.25
RUNS_S = 0.02  # CPU time between two looks; a thread that has used more moves


def play(job: RankJob, hang: Hang, events: Connection) -> None:
    """Run the scenario to its end, if it has one."""
    warnings.filterwarnings("ignore")
    nemo_logging.setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = _as_users_code(hang, job.folder / f"job-{job.rank}")
    os.setpgid(0, 0)  # with its data loader's workers, which end with it
    events.send(Notice.BEGINS)
    with _watched(events):
        run(Rank(job))


def _as_users_code(hang: Hang, folder: Path) -> Callable[[Rank], None]:
    """The scenario, loaded from a copy: frames inside an installed nemo_patches do not count as the user's code."""
    folder.mkdir()
    copy = shutil.copy(hang.source, folder)
    spec = importlib.util.spec_from_file_location(hang.module, copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Callable[[Rank], None] = getattr(module, hang.function)
    return run


@contextlib.contextmanager
def _watched(events: Connection) -> Iterator[None]:
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(threading.get_ident(), events, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()  # the pipe is the training thread's again


def _watch(thread: int, events: Connection, over: threading.Event) -> None:
    clock = time.pthread_getcpuclockid(thread)
    place, ran_s, since = list[tuple[CodeType, int]](), 0.0, time.monotonic()
    stands = False
    while not over.wait(LOOK_EVERY_S):
        now_at = [(frame.f_code, frame.f_lasti) for frame in stacks.frames(thread)]
        now_ran_s = time.clock_gettime(clock)
        if now_at != place or now_ran_s - ran_s > RUNS_S:
            place, since = now_at, time.monotonic()
            if stands:
                stands = False
                events.send(Notice.MOVES)
        elif not stands and time.monotonic() - since > STANDS_AFTER_S:
            stands = True
            events.send(_standing(thread))
        ran_s = now_ran_s


def _standing(thread: int) -> Stands:
    found = stacks.occupation(thread)
    if not found.collective:
        return Stands(stacks.where(thread).partition(" < ")[0], "")
    during = f", during {found.hook}" if found.hook else ""
    return Stands(f"{found.collective}, in {found.caller}{during}", found.collective)
