"""Which threads visibly move, and which only spin, poll or wait: real threads, looked at again and again."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Said, wait_until

from nemo_patches.stall import loader_workers, stacks
from nemo_patches.stall.motion import StackMotion, _names
from nemo_patches.stall.progress import NOT_COUNTED, Progress
from nemo_patches.stall.training_notes import LastCall, TrainingNotes

pytestmark = pytest.mark.one_nemo
LOOKS, PAUSE_S = 60, 0.02


class Thread:
    """It runs `work` until told to stop."""

    def __init__(self, work: Callable[[Thread], None]) -> None:
        self.stopped = threading.Event()
        self.is_stopped = False
        self.process: subprocess.Popen[bytes]  # of a thread that waits for one
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)
        self.thread.start()
        wait_until(lambda: self.thread.native_id)
        self.motion = StackMotion(self.thread.native_id or 0)

    def looks(self, count: int = LOOKS) -> list[bool]:
        found = []
        for _ in range(count):
            time.sleep(PAUSE_S)
            found.append(self.motion.moved(stacks.frames(self.thread.ident or 0)))
        return found

    def end(self) -> None:
        self.stopped.set()
        self.is_stopped = True
        self.thread.join(60)


def decodes(thread: Thread) -> None:
    for _ in range(10**9):
        torch.ones(1).item()
        if thread.stopped.wait(0.001):
            return


def reads_batches(thread: Thread) -> None:
    def batches() -> Iterator[object]:
        while not thread.stopped.is_set():
            yield object(), [0]

    for batch, (_,) in batches():
        time.sleep(0.001)
        del batch


def advances_as_lightning_does(thread: Thread) -> None:
    progress = SimpleNamespace(batch_idx=0)

    def advance() -> None:
        batch_idx = progress.batch_idx
        time.sleep(0.001)
        progress.batch_idx = batch_idx + 1

    while not thread.stopped.is_set():
        advance()


def counts_in_its_own_words(thread: Thread) -> None:
    done = 0
    while not thread.stopped.wait(0.001):
        done += 1


def maps(thread: Thread) -> None:
    list(map(lambda item: thread.stopped.wait(0.005 * (item >= 0)), range(500)))  # noqa: C417


def takes_the_next(thread: Thread) -> None:
    """A `while` loop over an iterator."""
    batches = iter([object() for _ in range(1000)])
    while (batch := next(batches, None)) is not None:
        thread.stopped.wait(0.005)
        del batch


def goes_from_one_to_the_next(thread: Thread) -> None:
    def validate() -> None:
        time.sleep(LOOKS * PAUSE_S / 3)

    def write() -> None:
        thread.stopped.wait(60)

    validate()
    write()


def spins(thread: Thread) -> None:
    while not thread.is_stopped:
        pass


def polls(thread: Thread) -> None:
    """As who waits for a file, and looks for it in code of its own."""

    def is_there() -> bool:
        found = [name for name in os.listdir("/") if name == "no such file"]
        return bool(found) or thread.stopped.is_set()

    while not is_there():
        time.sleep(0.002)


def computes(thread: Thread) -> None:
    """That it will not end would be a guess."""
    while not thread.stopped.is_set():
        torch.ones(50, 50).sum().item()


def is_in_one_call(thread: Thread) -> None:
    """Which takes a core."""
    while not thread.stopped.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000_000)


def tries_again(thread: Thread) -> None:
    """For ever, three times at a time."""
    while not thread.stopped.is_set():
        for _ in range(3):
            time.sleep(0.002)


def waits(thread: Thread) -> None:
    for _ in range(1):
        thread.stopped.wait(60)


MOVING = [
    counts_in_its_own_words,
    maps,
    takes_the_next,
    decodes,
    computes,
    reads_batches,
    advances_as_lightning_does,
    goes_from_one_to_the_next,
]


@pytest.mark.parametrize("work", MOVING)
def test_who_goes_on_is_seen_to_move(work: Callable[[Thread], None]) -> None:
    thread = Thread(work)
    try:
        assert any(thread.looks())
    finally:
        thread.end()


@pytest.mark.parametrize("work", [spins, polls, is_in_one_call, tries_again, waits])
def test_who_spins_polls_or_waits_is_not_seen_to_move_for_long(work: Callable[[Thread], None]) -> None:
    thread = Thread(work)
    try:
        thread.looks(2 * LOOKS)
        assert not any(thread.looks())
    finally:
        thread.end()


def test_an_inner_count_that_begins_again_is_motion() -> None:
    motion, found = StackMotion(threading.get_native_id()), []
    for outer in range(2):
        for inner in range(5):
            time.sleep(0.05)
            found.append((outer, inner, motion.moved(stacks.frames(threading.get_ident()))))
    assert all(moved for *_, moved in found[1:]), found


def test_the_first_look_is_no_motion() -> None:
    thread = Thread(decodes)
    try:
        for _ in range(10):
            assert thread.looks(1) == [False]
            thread.motion = StackMotion(thread.thread.native_id or 0)
    finally:
        thread.end()


def test_a_loops_variables_are_found_in_the_code() -> None:
    def loops(data: Any) -> Any:
        for one, (two, *three) in data:
            for four in one:
                print(two, three, four)
        other = 5
        return [other for _ in data], len(other)  # type: ignore[arg-type]

    found = _names(loops.__code__)
    assert {"one", "two", "four"} <= set(found.loops)
    assert not {"other", "data"} & set(found.loops)
    source = "for five, six in data:\n    step = 1\nseven, eight = next(data)"
    script = compile(source, "train.py", "exec")
    module = compile("\n" + source, "/site-packages/package/module.py", "exec")
    assert set(_names(script).loops) == set(_names(module).loops) == {"five", "six", "seven", "eight"}
    assert {"five", "six", "step"} <= set(_names(script).counters)
    assert _names(module).counters == ("step",)


def test_what_was_seen_takes_bounded_memory() -> None:
    motion = StackMotion(threading.get_native_id())

    def recurse(depth: int, step: int) -> None:
        if depth:
            recurse(depth - 1, step)
        else:
            motion.moved(stacks.frames(threading.get_ident()))

    for step in itertools.count():
        recurse(step % 300, step)
        if step > 1 << 12:
            break
    assert len(motion._values) <= (1 << 14) + 400


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_collectives_are_progress_and_a_pause_of_the_monitor_begins_anew(alone_in_a_group: None) -> None:
    progress, began = Progress(TrainingNotes()), time.monotonic()

    def still_s(after: float) -> float:
        """At `after` seconds of this test's own time."""
        progress.look(began + after, limit_s=1000)
        return round(progress.still_s(began + after))

    assert (still_s(10), still_s(20)) == (0, 10)  # what it had begun before is seen at the first look
    before = progress.begun
    dist.barrier()
    assert (still_s(30), still_s(31), progress.begun - before) == (0, 1, 1)
    part = dist.new_group([0])
    assert (still_s(40), still_s(50)) in [(0, 10), (10, 20)]
    dist.all_reduce(torch.ones(1), group=part)
    assert (still_s(60), still_s(61)) == (0, 1)
    progress.begin_anew(began + 100)
    assert round(progress.still_s(began + 101)) == 1


LIMIT_S = 2.0


def still_s(progress: Progress) -> float:
    progress.look(time.monotonic(), LIMIT_S)
    return progress.still_s(time.monotonic())


def progress_of(thread: Thread) -> Progress:
    """Of a rank with this training thread, whose last encoder call was some time ago."""
    notes, native_thread = TrainingNotes(), thread.thread.native_id or 0
    long_ago = time.monotonic() - LIMIT_S
    notes.last = LastCall(2, since=long_ago, thread=thread.thread.ident or 0, native_thread=native_thread)
    progress = Progress(notes)
    progress.stepped_at = progress.moved_at = long_ago
    return progress


def fills_a_buffer(pipe: Connection) -> None:
    """As a data loader's worker does, for minutes before the first batch; then it is idle."""
    while not pipe.poll():
        sum(range(10_000))
    pipe.recv()
    pipe.send(True)
    pipe.recv()


def test_a_rank_whose_loaders_worker_computes_moves() -> None:
    thread = Thread(waits)
    progress = progress_of(thread)
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=fills_a_buffer, args=(theirs,), daemon=True)
    worker.start()

    try:
        wait_until(lambda: still_s(progress) < 0.5, 30)  # less than the thread waits for
        ours.send(True)
        assert ours.recv()
        wait_until(lambda: still_s(progress) > 3)  # it is idle
    finally:
        worker.kill()
        worker.join()
        thread.end()


def test_a_rank_that_waits_for_a_command_that_computes_moves(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = f"sh -c 'while [ ! -e {done} ]; do :; done; sleep 600'; :"  # "; :": else the shell becomes the command

    def runs_a_command(thread: Thread) -> None:
        with subprocess.Popen(["sh", "-c", command], start_new_session=True) as process:
            thread.process = process
            process.wait()

    thread = Thread(runs_a_command)
    progress = progress_of(thread)
    try:
        wait_until(lambda: still_s(progress) < 0.5, 30)
        done.touch()
        wait_until(lambda: still_s(progress) > 3)
    finally:
        os.killpg(thread.process.pid, signal.SIGKILL)
        thread.end()


@pytest.mark.parametrize("is_one_wait", [True, False])
def test_a_thread_that_has_not_run_at_all_is_in_one_wait_and_one_that_polls_is_not(is_one_wait: bool) -> None:
    def work(thread: Thread) -> None:
        while not thread.stopped.wait(600 if is_one_wait else 0.05):
            pass

    thread = Thread(work)
    progress = progress_of(thread)
    try:
        if is_one_wait:
            wait_until(lambda: still_s(progress) > 0 and progress.sleeps, 30)
        for _ in range(30):
            still_s(progress)
            assert progress.sleeps == is_one_wait
            time.sleep(PAUSE_S)
    finally:
        thread.end()


def test_where_collectives_are_not_counted_it_is_said_once(alone_in_a_group: None) -> None:
    said, notes = Said(), TrainingNotes()
    said.setLevel(0)
    progress, world = Progress(notes), dist.group.WORLD
    dist.group.WORLD = dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[misc]
    try:
        for now in range(3):
            progress.look(time.monotonic() + 10 + now, LIMIT_S)
    finally:
        dist.group.WORLD = world  # type: ignore[misc]
    assert progress.begun == NOT_COUNTED
    assert len([line for line in said.lines if "collectives that this rank begins are not counted" in line]) == 1


def test_a_workers_files_are_those_that_it_reads(tmp_path: Path) -> None:
    read, written = tmp_path / "shard.tar", tmp_path / "worker.log"
    read.touch()
    with read.open(), written.open("w"), (tmp_path / "both").open("w+"):
        assert loader_workers._open_files(Path("/proc/self")) == [str(tmp_path / "both"), str(read)]
