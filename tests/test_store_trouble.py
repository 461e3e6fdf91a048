"""A store that is slow, silent or gone while a rank is missing: what the waiting ranks still say, and how soon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import REPORT_S, SLACK_S, Said, in_step, run_ranks, stall_monitor, wait_for_others, wait_until

import nemo_patches
from nemo_patches.channel.store import JobStore
from nemo_patches.stall import store_client
from nemo_patches.stall.store_client import StoreClient, StoreUnansweredError, read_heartbeats

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
TIMEOUT = 2.0
STALL_TIMEOUT = 4.0


class Proxy:
    """Stands between the ranks and the store's real server. What the file `mode` says: open, slow, silent or gone;
    reset: every connection that there is, once, and then open."""

    def __init__(self, server: int, mode: Path) -> None:
        self.server, self._mode = server, mode
        change(mode, "open")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended = True
        for thread in list(self._threads):
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended:
            if self._mode.read_text() == "reset" and not any(one.is_alive() for one in self._threads[1:]):
                change(self._mode, "open")
            if self._mode.read_text() != "reset" and select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._relay, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.server)) as server:
            other = {client: server, server: client}
            while not self._ended:
                mode = self._mode.read_text()
                if mode == "gone":
                    return
                if mode == "reset":
                    for one in other:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                ready = select.select(list(other), [], [], 0.02)[0] if mode != "silent" else []
                if mode == "silent":
                    time.sleep(0.02)
                if ready and mode == "slow":
                    time.sleep(0.05)
                for one in ready:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = one.recv(1 << 16)
                    if not data:
                        return
                    with contextlib.suppress(OSError):
                        other[one].sendall(data)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Proxy(server.port, tmp_path / "mode")
    yield one
    one.close()


def two_are_missing(rank: int, size: int, port: int, folder: str, mode: str, stall_port: str = "on") -> Any:
    """Rank 1 is elsewhere, and rank 3 stopped. The store's server is in no rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    encoder = in_step(timeout=TIMEOUT, stall_port=stall_port)
    said = [Path(folder, f"said-{one}") for one in (0, 2)]
    if rank == 3:
        change(Path(folder, "pid"), str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        wait_until(lambda: is_stopped(Path(folder, "pid")))
        change(Path(folder, "mode"), mode)
        wait_for_files(said)
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    if rank % 2:
        encoders.sync(encoder, 200)
        dist.barrier()
        return None
    wait_until(lambda: Path(folder, "mode").read_text() == mode)
    began = time.monotonic()
    call = encoders.sync(encoder, 200)
    wait_until(lambda: nemo_patches.status().stalls)
    report = time.monotonic() - began
    (stall,) = nemo_patches.status().stalls
    Path(folder, f"said-{rank}").touch()
    dist.barrier()
    found = [(one.rank, one.kind, one.host, one.pid > 0, one.where) for one in stall.missing]
    return call, report, found, stall.unknown, encoder.max_audio_length


def is_stopped(pid: Path) -> bool:
    return pid.exists() and Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def change(file: Path, text: str) -> None:
    """At once: a reader sees the text before, or this one."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


def wait_for_files(files: list[Path]) -> None:
    wait_until(lambda: all(file.exists() for file in files))


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        ("slow", ""),
        ("silent", " | the job's store has not answered for "),
        ("gone", " | the job's store, which all ranks meet at, is gone: "),
    ],
)
def test_the_report_comes_in_time_and_names_who_is_missing(mode: str, note: str, proxy: Proxy, tmp_path: Path) -> None:
    results = run_ranks(two_are_missing, 4, proxy.port, str(tmp_path), mode, group=False)
    for rank in (0, 2):
        call, report, missing, unknown, maximum = results[rank].value
        assert call < TIMEOUT + SLACK_S
        assert report < TIMEOUT + REPORT_S
        (first, kind, host, has_pid, where), other = missing
        assert (first, kind, host, has_pid) == (1, "elsewhere", socket.gethostname(), True)
        assert "wait_for_files" in where
        assert other == (3, "no heartbeat", socket.gethostname(), True, "")
        assert unknown == ""
        assert maximum == 200
        (line,) = results[rank].lines("not every rank's length came")
        assert "Missing: ranks 1, 3 of 4 | rank 1 (" in line
        assert note in line and ("the ranks themselves were asked" in line) == bool(note)
        assert results[rank].lines("ERROR") == []


@pytest.mark.parametrize("mode", ["silent", "gone"])
def test_without_a_port_it_cannot_be_told_and_why_is_said(mode: str, proxy: Proxy, tmp_path: Path) -> None:
    results = run_ranks(two_are_missing, 4, proxy.port, str(tmp_path), mode, "off", group=False)
    for rank in (0, 2):
        call, report, missing, unknown, maximum = results[rank].value
        assert call < TIMEOUT + SLACK_S
        assert report < TIMEOUT + REPORT_S
        assert (missing, maximum) == ([], 200)
        assert unknown.endswith("; the ranks themselves are not asked: stall_port=off")
        (line,) = results[rank].lines("not every rank's length came")
        assert "Missing: cannot be told | the job's store" in line and line.endswith("not asked: stall_port=off")
        assert results[rank].lines("ERROR") == []


def nobody_calls(rank: int, size: int, port: int, folder: str, mode: str) -> None:
    """Rank 1 is elsewhere, rank 3 stopped, and the others wait in a barrier. The store's server is in no rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    in_step(timeout=TIMEOUT, stall_timeout=0)
    nemo_patches.apply(stall_timeout=STALL_TIMEOUT)
    said = Said()
    files = [Path(folder, f"said-{one}") for one in (0, 2)]
    if rank == 3:
        change(Path(folder, "pid"), str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        wait_until(lambda: is_stopped(Path(folder, "pid")))
        change(Path(folder, "mode"), mode)
        wait_for_files(files)
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    else:
        telling = threading.Thread(
            target=lambda: (wait_until(lambda: said.lines), files[rank // 2].touch()), daemon=True
        )
        telling.start()
    dist.barrier()


@pytest.mark.parametrize(("mode", "note"), [("slow", ""), ("silent", "has not answered for"), ("gone", "is gone: ")])
def test_where_all_ranks_are_is_told_in_time(mode: str, note: str, proxy: Proxy, tmp_path: Path) -> None:
    results = run_ranks(nobody_calls, 4, proxy.port, str(tmp_path), mode, group=False)
    for rank in (0, 2):
        (line,) = results[rank].lines("WARNING", "no encoder call for ")
        seconds, _, groups = line.partition("no encoder call for ")[2].partition(" s. ")
        assert int(seconds) < STALL_TIMEOUT + REPORT_S
        elsewhere, stopped, waiting, *rest = groups.split(" | ")
        assert elsewhere.startswith(f"rank 1 ({socket.gethostname()}, pid ") and "wait_for_files (" in elsewhere
        assert stopped.startswith(f"rank 3 ({socket.gethostname()}, pid ") and ") has no heartbeat: " in stopped
        assert waiting == "ranks 0, 2: barrier"
        assert len(rest) == bool(note) and all(note in text and text.endswith("were asked") for text in rest)


def one_has_no_way_to_the_store(rank: int, size: int, server: int, own_way: int, folder: str, mode: str) -> Any:
    """Rank 1, which is elsewhere; its connections have been reset, or are silent. The store's server is in no rank."""
    store = dist.TCPStore("127.0.0.1", own_way if rank == 1 else server, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    encoder = in_step(timeout=TIMEOUT)
    said, seen = Said(), [Path(folder, f"seen-{one}") for one in (0, 2)]
    if rank == 1:
        change(Path(folder, "mode"), mode)
        wait_until(lambda: Path(folder, "mode").read_text() in ("open", "silent"))  # else its resets are not over
        wait_until(lambda: (latest := stall_monitor().latest) and latest.number > 4)  # it goes on to make heartbeats
        Path(folder, "cut").touch()
        wait_for_files(seen)
        encoders.sync(encoder, 200)
        dist.barrier()
        return None
    wait_for_files([Path(folder, "cut")])
    before = heart()
    if mode == "reset":
        wait_until(lambda: heart() > before + 2)
    encoders.sync(encoder, 200)
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL_TIMEOUT)
    telling = threading.Thread(
        target=lambda: (
            wait_until(lambda: any("no encoder call" in line for line in said.lines)),
            seen[rank // 2].touch(),
        )
    )
    telling.start()
    dist.barrier()
    telling.join()
    return [(one.rank, one.kind, "wait_for_files" in one.where) for one in stall.missing]


def heart() -> int:
    """How many heartbeats rank 1 has made by the time of its last in the store."""
    with stall_monitor().client.asking() as store:
        return read_heartbeats(store, [1])[1].number


@pytest.mark.parametrize("mode", ["reset", "silent"])
def test_a_rank_that_answers_has_a_heartbeat_whatever_its_way_to_the_store(
    mode: str, proxy: Proxy, tmp_path: Path
) -> None:
    results = run_ranks(
        one_has_no_way_to_the_store, 3, proxy.server, proxy.port, str(tmp_path), mode, group=False, limit=120
    )
    for rank in (0, 2):
        assert results[rank].value == [(1, "elsewhere", True)]
        (line,) = results[rank].lines("no encoder call for ")
        assert "wait_for_files (" in line
        assert results[rank].lines("no heartbeat") == results[rank].lines("ERROR") == []
    assert results[1].lines("ERROR") == []


def test_a_thread_without_an_answer_holds_up_no_other_for_long(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask while the store is silent are told so; where it answers again, so does the way to it."""
    monkeypatch.setattr(store_client, "_GIVEN_UP_AFTER_S", 0.5)
    default_store = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
    client = StoreClient(JobStore(default_store, 0))
    with client.asking(join=True) as store:
        store.add("asked", 1)
    change(tmp_path / "mode", "silent")
    ended: list[str] = []

    def ask() -> None:
        try:
            with client.asking() as store:
                store.add("asked", 1)
            ended.append("answered")
        except StoreUnansweredError:
            ended.append("told")

    def asked_until(outcome: str, count: int) -> bool:
        client.ask_in_thread(ask)
        time.sleep(0.1)
        return ended.count(outcome) >= count

    wait_until(lambda: asked_until("told", 3))
    before = len(threading.enumerate())
    for _ in range(20):
        client.ask_in_thread(ask)
    wait_until(lambda: len(threading.enumerate()) <= before + 1)  # none stays there but one that tries again
    change(tmp_path / "mode", "open")
    wait_until(lambda: asked_until("answered", 20))  # more than there are threads that had waited
    client.disconnect()
    client.join([], timedelta(seconds=60))


def entered(rank: int, size: int) -> set[tuple[str, str]]:
    """Which threads have called which methods of a store: healthy, while a rank is missing, and at the end."""
    found: set[tuple[str, str]] = set()

    def noting(method: str, original: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            found.add((threading.current_thread().name, method))
            return original(*arguments)

        return noted

    for method in ("set", "get", "add", "check", "multi_get", "compare_set"):
        setattr(dist.PrefixStore, method, noting(method, getattr(dist.PrefixStore, method)))
    encoder = in_step(timeout=TIMEOUT)
    monitor = stall_monitor()
    if rank == 0:
        encoders.sync(encoder, 200)
        wait_until(lambda: nemo_patches.status().stalls)
    wait_for_others("rank 0 has said so", size)
    if rank == 1:
        encoders.sync(encoder, 200)
    dist.barrier()
    monitor.stop()
    monitor.join(timedelta(seconds=60))
    return found


def test_the_monitors_thread_never_calls_the_store() -> None:
    for result in run_ranks(entered, 2):
        assert ("nemo_patches heartbeats", "set") in result.value
        assert [one for one in result.value if one[0] == "nemo_patches stall monitor"] == []
