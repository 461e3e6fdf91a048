"""A script may give SIGPIPE or SIGXFSZ their default action: no write of ours ends a rank by them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from exchange_job import Job, Rank
from ranks import wait_until

from nemo_patches.channel import signals
from nemo_patches.channel.daemon import Daemon
from nemo_patches.watch import job_folder, visitors
from nemo_patches.watch.job_socket import JobSocket, near

pytestmark = pytest.mark.one_nemo
LIMIT_S = 120.0


def by_default(rank: int = 0) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def reset_all(rank: Rank, count: int) -> None:
    """Again and again the other ends of all connections are gone, and this one sends."""

    def cut() -> None:
        for link in list(rank.exchange._all_links):
            if link.is_ready:
                link.socket.shutdown(socket.SHUT_RDWR)
                link.send(99)
                link.send(99)

    for _ in range(count):
        rank.exchange.post(cut)
        time.sleep(0.02)


def test_a_send_to_a_rank_that_has_gone_ends_nobody() -> None:
    with Job(4, setup=by_default) as job:
        job.do(job.all, reset_all, 3)
        job.do(job.all, Rank.hold_rounds, 3)
        job.do(job.all, Rank.close)
        for process in job.processes:
            assert os.waitpid(process, os.WNOHANG) == (0, 0)


def in_a_child(work: Callable[[], object]) -> int:
    """How a process ends in which these signals have their default action."""
    child = os.fork()
    if child == 0:
        by_default()
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_client_that_hangs_up_before_its_answer_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = job_folder.private_folder(29500)

    def answers() -> None:
        own = JobSocket(0, 29500)
        client = socket.socket(socket.AF_UNIX)
        with near(folder, own._name) as path:
            client.connect(path)
        (visitor,) = visitors.visitors(own.listener)
        client.close()
        assert visitors.Sending(visitor, b"here").go_on()
        assert visitor.fileno() == -1

    assert in_a_child(answers) == 0


def write_to_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"a line")


def write_beyond_the_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    with tempfile.TemporaryFile() as file, pytest.raises(OSError):
        for _ in range(20):
            os.write(file.fileno(), b"a line")


@pytest.mark.parametrize("write", [write_to_nobody, write_beyond_the_limit])
@pytest.mark.parametrize("where", ["our thread", "another"])
def test_a_write_of_ours_fails_without_a_signal(
    where: str, write: Callable[[], None]
) -> None:
    def writes() -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if where == "our thread":
            failed: list[int] = []
            thread = Daemon("test", lambda: (write(), failed.append(0)))
            thread.begin()
            thread.join()
            assert failed
        else:
            with signals.kept_off():
                write()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        assert not signal.sigpending()

    assert in_a_child(writes) == 0


def test_the_users_own_write_still_ends_the_process() -> None:
    """After ours: nothing is changed for the script."""

    def writes() -> None:
        with signals.kept_off():
            write_to_nobody()
        write_to_nobody()

    assert in_a_child(writes) == -signal.SIGPIPE


LINES = """
import os, signal, sys
from nemo_patches import patching
from nemo_patches.sync import rank_log
from nemo_patches.watch import log_line
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.read(0, 1)  # nobody reads stderr any more
for _ in range(3):
    rank_log.report(30, "a rank is late")
    log_line.report(30, "a rank is late")
    patching.say_error("not patched")
print("goes on", flush=True)
sys.exit(7)
"""


def test_a_line_on_a_stderr_that_nobody_reads_ends_nobody() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LINES], stdin=-1, stdout=-1, stderr=-1
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    out, _ = process.communicate(b"x", timeout=LIMIT_S)
    assert (out, process.returncode) == (b"goes on\n", 7)


COMMAND = """
import signal, sys, threading
from nemo_patches.watch import on_stall
on_stall.start("sh -c 'grep SigBlk /proc/self/status > %s'", "text").join(60)
"""


def test_what_on_stall_starts_has_no_signal_blocked(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", COMMAND % told]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert int(told.read_text().split()[1], 16) == 0


def test_an_answer_that_no_socket_holds_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = job_folder.private_folder(29500)
    own = JobSocket(0, 29500)
    data = os.urandom(1 << 20)
    answers: list[bytes] = []
    may_read = threading.Event()

    def visit() -> None:
        with socket.socket(socket.AF_UNIX) as visitor, near(folder, own._name) as path:
            visitor.connect(path)
            may_read.wait(60)
            with visitor.makefile("rb") as answer:
                answers.append(answer.read())

    thread = threading.Thread(target=visit)
    thread.start()
    try:
        let_in: list[socket.socket] = []
        wait_until(lambda: let_in.extend(visitors.visitors(own.listener)) or let_in)
        sending = visitors.Sending(let_in[0], data)
        assert not sending.go_on()  # the client is slow
        may_read.set()
        wait_until(sending.go_on)
        thread.join(60)
        assert answers == [data]
    finally:
        may_read.set()
        own.close()
