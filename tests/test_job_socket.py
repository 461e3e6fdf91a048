"""A rank's Unix socket: who removes which, also where two containers share the folder; and this
host's own name.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import Said, wait_until

from nemo_patches import patching
from nemo_patches.sync import rank_log
from nemo_patches.watch import job_folder, job_socket, visitors
from nemo_patches.watch.job_socket import ENDING, JobSocket, near, remove_left

pytestmark = pytest.mark.one_nemo
NOBODY = 1 << 22  # more than any pid


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return job_folder.private_folder(29500)


def bound(stack: ExitStack, folder: Path, name: str, listens: bool) -> Path:
    """A socket's file, at which somebody listens or nobody does any more."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    with near(folder, name) as path:
        listener.bind(path)
    if listens:
        listener.listen(1)
    return folder / name


def test_only_what_nobody_listens_at_is_removed(folder: Path) -> None:
    here, there = job_socket._here(), f"1-{job_socket._host()}"
    with ExitStack() as stack:
        kept = [
            bound(
                stack, folder, f"rank_0.{there}.{NOBODY}{ENDING}", listens=True
            ),  # another container's
            bound(
                stack, folder, f"rank_1.{here}.{os.getpid()}{ENDING}", listens=False
            ),  # about to listen
            bound(
                stack, folder, f"rank_5.1-elsewhere.{NOBODY}{ENDING}", listens=False
            ),  # of a host that shares the folder
        ]
        bound(stack, folder, f"rank_2.{there}.{os.getpid()}{ENDING}", listens=False)
        bound(stack, folder, f"rank_3.{here}.{NOBODY}{ENDING}", listens=False)
        (folder / f"rank_4{ENDING}").touch()
        remove_left(folder)
        assert sorted(folder.glob(f"*{ENDING}")) == sorted(kept)


def test_folders_of_jobs_that_are_gone_are_removed_after_a_week(folder: Path) -> None:
    old, recent, live = (folder.parent / name for name in ("old", "recent", "live"))
    for each in (old, recent, live):
        each.mkdir()
        (each / "stall_rank_0.json").touch()
    with ExitStack() as stack:
        name = f"rank_0.{job_socket._here()}.{os.getpid()}{ENDING}"
        bound(stack, live, name, listens=True)
        for each in (old, live):
            for path in (*each.iterdir(), each):
                os.utime(path, (0, 0), follow_symlinks=False)
        JobSocket(0, 29500).close()
    assert sorted(folder.parent.iterdir()) == sorted((folder, recent, live))


def test_ranks_with_the_same_number_and_pid_in_two_containers_have_each_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = JobSocket(0, 29500)
    monkeypatch.setattr(job_socket, "_here", lambda: f"1-{job_socket._host()}")
    second = JobSocket(0, 29500)
    try:
        assert len(list(folder.glob(f"*{ENDING}"))) == 2
        # The second one has asked whether it is there, and wants no answer.
        assert visitors.visitors(first.listener) == []
    finally:
        first.close()
        second.close()
    assert list(folder.iterdir()) == []


def test_the_longest_name_of_a_host_fits_beside_the_most_digits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a pod: Linux allows 64 characters, and a socket's path 107."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 63 + ".")
    own = JobSocket(1 << 20, 29500)
    try:
        assert job_socket.process_of(folder / own._name) == os.getpid()
    finally:
        own.close()


def test_a_visitor_that_waits_is_answered(folder: Path) -> None:
    own = JobSocket(0, 29500)
    answers: list[bytes] = []

    def visit() -> None:
        with socket.socket(socket.AF_UNIX) as visitor, near(folder, own._name) as path:
            visitor.connect(path)
            answers.append(visitor.recv(100))

    thread = threading.Thread(target=visit)
    thread.start()
    try:
        let_in: list[socket.socket] = []
        wait_until(lambda: let_in.extend(visitors.visitors(own.listener)) or let_in)
        assert visitors.Sending(let_in[0], b"here").go_on()
        thread.join(60)
        assert answers == [b"here"]
    finally:
        own.close()


def test_a_hosts_name_forges_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "node7\nnemo_patches ERROR [rank 0/8 node1] forged"
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(
        os, "uname", lambda: os.uname_result(("Linux", name, "", "", ""))
    )
    said = Said()
    rank_log.report(30, "a rank is late")
    patching.say_error("not patched")
    assert ["\n" in line for line in said.lines] == [False]
    assert (
        len(
            [
                line
                for line in capsys.readouterr().err.splitlines()
                if "not patched" in line
            ]
        )
        == 1
    )
    rank_log.logger.removeHandler(said)
