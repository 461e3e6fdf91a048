"""What is work, and what only counts, polls or waits: real threads and processes, looked at often."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Said, wait_until

from nemo_patches.channel.daemon import Daemon
from nemo_patches.watch import descendants, loader_workers, motion
from nemo_patches.watch.descendants import Descendants
from nemo_patches.watch.late_modules import LateModules
from nemo_patches.watch.motion import RankMotion
from nemo_patches.watch.progress import NOT_COUNTED, Progress
from nemo_patches.watch.training_notes import LastCall, TrainingNotes

pytestmark = pytest.mark.one_nemo
LOOKS, PAUSE_S = 40, 0.05
WINDOW_S = 0.5


class Thread:
    """It runs `work` until told to stop; meanwhile a thread of ours looks at this process."""

    def __init__(self, work: Callable[[Thread], None]) -> None:
        self.stopped = threading.Event()
        self.is_stopped = False
        self.process: subprocess.Popen[bytes]  # of a thread that waits for one
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)
        self.thread.start()
        wait_until(lambda: self.thread.native_id)

    def works(self) -> bool:
        """Whether this process is seen to, at any look."""
        found: list[bool] = []
        watch = Daemon("a test", self._look, found)
        assert not watch.begin()
        watch.join(60)
        return any(found)

    def waited_s(self) -> float:
        """For a core."""
        assert self.thread.native_id is not None
        return motion._threads(os.getpid())[self.thread.native_id].waited_s

    def _look(self, found: list[bool]) -> None:
        motion = RankMotion(WINDOW_S)
        descendants = Descendants()
        for _ in range(LOOKS):
            motion.look(descendants.look(()))
            if motion.works:
                found.append(True)
                return
            time.sleep(PAUSE_S)

    def end(self) -> None:
        self.stopped.set()
        self.is_stopped = True
        self.thread.join(60)


def counts(thread: Thread) -> None:
    """As a data set that retries for ever."""
    attempt = 0
    while not thread.stopped.wait(0.01):
        attempt += 1


def reads_batches(thread: Thread) -> None:
    def batches() -> Iterator[object]:
        while not thread.stopped.is_set():
            yield object(), [0]

    for batch, (_,) in batches():
        time.sleep(0.01)
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


def samples_the_machine(thread: Thread) -> None:
    """As a monitor's thread, every second."""
    while not thread.stopped.wait(1.0):
        for name in ("stat", "meminfo", "net/dev", "diskstats"):
            Path("/proc", name).read_text().split()


def computes(thread: Thread) -> None:
    """That it will not end would be a guess."""
    while not thread.stopped.is_set():
        torch.ones(50, 50).sum().item()


def is_in_one_call(thread: Thread) -> None:
    """Which takes a core."""
    while not thread.stopped.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # a second or two


def tries_again(thread: Thread) -> None:
    """For ever, three times at a time."""
    while not thread.stopped.is_set():
        for _ in range(3):
            time.sleep(0.002)


def waits(thread: Thread) -> None:
    for _ in range(1):
        thread.stopped.wait(60)


def starts_threads(thread: Thread) -> None:
    """Each ends before there is another look."""
    while not thread.stopped.is_set():
        one = threading.Thread(target=sum, args=(range(200_000),))
        one.start()
        one.join()


def starts_commands(thread: Thread) -> None:
    while not thread.stopped.is_set():
        subprocess.run(["sh", "-c", "for i in $(seq 5000); do :; done"], check=True)


LOOP = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def has_a_grandchild(thread: Thread) -> None:
    """By a shell that waits."""
    with subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{LOOP}'; :"]) as process:
        thread.stopped.wait(60)
        for pid in [*descendants._children(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)


def has_an_orphan(thread: Thread) -> None:
    """Its parent, a shell, has ended: this thread waits for its output."""
    command = f"{sys.executable} -c '{LOOP}' & echo $!"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.wait()
        thread.stopped.wait(60)
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize(
    "work",
    [
        computes,
        spins,
        is_in_one_call,
        starts_threads,
        starts_commands,
        has_a_grandchild,
        has_an_orphan,
    ],
)
def test_what_a_rank_or_what_it_has_started_computes_is_work(
    work: Callable[[Thread], None],
) -> None:
    thread = Thread(work)
    try:
        assert thread.works()
    finally:
        thread.end()


@pytest.mark.parametrize(
    "work",
    [
        counts,
        reads_batches,
        goes_from_one_to_the_next,
        polls,
        samples_the_machine,
        tries_again,
        waits,
    ],
)
def test_who_counts_polls_or_waits_does_not_work(
    work: Callable[[Thread], None],
) -> None:
    """On a busy machine one that has waited for a core may be taken to work, for a rank that
    computes there must be: then it is looked at again.
    """
    thread = Thread(work)
    try:
        first = time.monotonic()
        while time.monotonic() < first + 60:
            began, waited_s = time.monotonic(), thread.waited_s()
            if not thread.works():
                return
            waited_s = thread.waited_s() - waited_s
            assert waited_s > 0.1 * (time.monotonic() - began), "it had a core"
        raise AssertionError("it is seen to work each time")
    finally:
        thread.end()


def test_what_our_own_threads_compute_is_no_work() -> None:
    thread = Thread(waits)
    ours = [Daemon("a test", spins, thread) for _ in range(2)]
    brief = [Daemon("a test", sum, range(2_000_000)) for _ in range(5)]
    try:
        for one in ours:
            assert not one.begin()
        looked = Daemon("a test", lambda: [one.begin() for one in brief])
        assert not looked.begin()
        assert not thread.works()
    finally:
        thread.end()


def test_a_process_of_which_the_kernel_tells_nothing_counts_by_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(motion, "_threads", lambda *_, **__: {})
    thread = Thread(computes)
    try:
        assert thread.works()
    finally:
        thread.end()


def test_the_first_look_shows_nothing() -> None:
    thread = Thread(computes)
    try:
        for _ in range(10):
            one = RankMotion(WINDOW_S)
            one.look(())
            assert not one.works
    finally:
        thread.end()


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_collectives_are_progress_and_a_pause_of_the_monitor_begins_anew(
    alone_in_a_group: None,
) -> None:
    progress, began = Progress(TrainingNotes(), LateModules()), time.monotonic()

    def still_s(after: float) -> float:
        """At `after` seconds of this test's own time."""
        progress.look(began + after, limit_s=1000)
        return round(progress.still_s(began + after))

    # What it had begun before is seen at the first look.
    assert (still_s(10), still_s(20)) == (0, 10)
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
    notes.last = LastCall(
        2, since=long_ago, thread=thread.thread.ident or 0, native_thread=native_thread
    )
    progress = Progress(notes, LateModules())
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
    worker = multiprocessing.get_context("fork").Process(
        target=fills_a_buffer, args=(theirs,), daemon=True
    )
    worker.start()

    try:
        # Less than the thread waits for.
        wait_until(lambda: still_s(progress) < 0.5, 30)
        ours.send(True)
        assert ours.recv()
        # It is idle. A look each 10 ms of this thread's would be work on a slow machine.
        wait_until(lambda: still_s(progress) > 3, pause_s=0.2)
    finally:
        worker.kill()
        worker.join()
        thread.end()


def test_a_rank_that_waits_for_a_command_that_computes_moves(tmp_path: Path) -> None:
    done = tmp_path / "done"
    # "; :": else the shell becomes the command
    command = f"sh -c 'while [ ! -e {done} ]; do :; done; sleep 600'; :"

    def runs_a_command(thread: Thread) -> None:
        with subprocess.Popen(["sh", "-c", command], start_new_session=True) as process:
            thread.process = process
            process.wait()

    thread = Thread(runs_a_command)
    progress = progress_of(thread)
    try:
        wait_until(lambda: still_s(progress) < 0.5, 30)
        done.touch()
        wait_until(lambda: still_s(progress) > 3, pause_s=0.2)
    finally:
        os.killpg(thread.process.pid, signal.SIGKILL)
        thread.end()


@pytest.mark.parametrize("is_one_wait", [True, False])
def test_a_thread_that_has_not_run_at_all_is_in_one_wait_and_one_that_polls_is_not(
    is_one_wait: bool,
) -> None:
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


def test_where_collectives_are_not_counted_it_is_said_once(
    alone_in_a_group: None,
) -> None:
    said, notes = Said(), TrainingNotes()
    said.setLevel(0)
    progress, world = Progress(notes, LateModules()), dist.group.WORLD
    dist.group.WORLD = dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[misc]
    try:
        for now in range(3):
            progress.look(time.monotonic() + 10 + now, LIMIT_S)
    finally:
        dist.group.WORLD = world  # type: ignore[misc]
    assert progress.begun == NOT_COUNTED
    assert (
        len(
            [
                line
                for line in said.lines
                if "collectives that this rank begins are not counted" in line
            ]
        )
        == 1
    )


def test_a_workers_files_are_those_that_it_reads(tmp_path: Path) -> None:
    read, written = tmp_path / "shard.tar", tmp_path / "worker.log"
    read.touch()
    with read.open(), written.open("w"), (tmp_path / "both").open("w+"):
        assert loader_workers._open_files(Path("/proc/self")) == [
            str(tmp_path / "both"),
            str(read),
        ]
