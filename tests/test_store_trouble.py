"""A store that is slow, silent or gone while a rank is missing: what the waiting ranks still say,
and how soon.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import REPORT_S, SLACK_S, Said, in_step, run_ranks, wait_until
from store_proxy import Proxy, change
from store_proxy import proxy as proxy

import nemo_patches
from nemo_patches.judging.kinds import ANSWERS_NOTHING

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
TIMEOUT = 2.0
STALL_TIMEOUT = 4.0


def two_are_missing(rank: int, size: int, port: int, folder: str, mode: str) -> Any:
    """Rank 1 is elsewhere, and rank 3 stopped. The store's server is in no rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    encoder = in_step(timeout=TIMEOUT)
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
    found = [
        (one.rank, one.kind, one.host, one.pid > 0, one.where) for one in stall.missing
    ]
    return call, report, found, stall.unknown, encoder.max_audio_length


def is_stopped(pid: Path) -> bool:
    return (
        pid.exists()
        and Path(f"/proc/{pid.read_text()}/stat")
        .read_text()
        .rpartition(")")[2]
        .split()[0]
        == "T"
    )


def wait_for_files(files: list[Path]) -> None:
    wait_until(lambda: all(file.exists() for file in files))


@pytest.mark.parametrize("mode", ["slow", "silent", "gone"])
def test_the_report_comes_in_time_and_names_who_is_missing(
    mode: str, proxy: Proxy, tmp_path: Path
) -> None:
    results = run_ranks(
        two_are_missing, 4, proxy.port, str(tmp_path), mode, group=False
    )
    for rank in (0, 2):
        call, report, missing, unknown, maximum = results[rank].value
        assert call < TIMEOUT + SLACK_S
        assert report < TIMEOUT + REPORT_S
        (first, kind, host, has_pid, where), other = missing
        assert (first, kind, host, has_pid) == (
            1,
            "elsewhere",
            socket.gethostname(),
            True,
        )
        assert "wait_for_files" in where
        assert other == (3, "no heartbeat", socket.gethostname(), True, ANSWERS_NOTHING)
        assert unknown == ""
        assert maximum == 200
        (line,) = results[rank].lines("not every rank's length came")
        assert "Missing: ranks 1, 3 of 4 | rank 1 (" in line
        assert "the job's store" not in line  # nobody has asked it
        assert results[rank].lines("ERROR") == []


def nobody_calls(rank: int, size: int, port: int, folder: str, mode: str) -> float:
    """Rank 1 is elsewhere, rank 3 stopped, and the others wait in a barrier: for how long, until
    they say so. The store's server is in no rank.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    in_step(timeout=TIMEOUT, stall_timeout=0)
    nemo_patches.apply(stall_timeout=STALL_TIMEOUT)
    said = Said()
    files = [Path(folder, f"said-{one}") for one in (0, 2)]
    waited_s = [0.0]
    began = time.monotonic()

    def tell() -> None:
        wait_until(lambda: said.lines)
        waited_s[0] = time.monotonic() - began
        files[rank // 2].touch()

    if rank == 3:
        change(Path(folder, "pid"), str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        wait_until(lambda: is_stopped(Path(folder, "pid")))
        change(Path(folder, "mode"), mode)
        wait_for_files(files)
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    else:
        threading.Thread(target=tell, daemon=True).start()
    dist.barrier()
    return waited_s[0]


@pytest.mark.parametrize("mode", ["slow", "silent", "gone"])
def test_where_all_ranks_are_is_told_in_time(
    mode: str, proxy: Proxy, tmp_path: Path
) -> None:
    results = run_ranks(nobody_calls, 4, proxy.port, str(tmp_path), mode, group=False)
    for rank in (0, 2):
        # A second one follows at twice the time, where the other rank is slow to say its own.
        line = results[rank].lines("WARNING", "no encoder call for ")[0]
        assert results[rank].value < STALL_TIMEOUT + REPORT_S
        elsewhere, stopped, waiting = line.partition(" s. ")[2].split(" | ")
        assert (
            elsewhere.startswith(f"rank 1 ({socket.gethostname()}, pid ")
            and "wait_for_files (" in elsewhere
        )
        assert (
            stopped.startswith(f"rank 3 ({socket.gethostname()}, pid ")
            and f") {ANSWERS_NOTHING}" in stopped
        )
        assert waiting.startswith(
            "ranks 0, 2: barrier, in nobody_calls (test_store_trouble.py:"
        )


def asked(rank: int, size: int) -> set[str]:
    """Which methods of a store any thread of ours has called since the ranks are connected:
    healthy, and hung.
    """
    found: set[str] = set()
    encoder = in_step(timeout=TIMEOUT)
    dist.barrier()

    def noting(method: str, original: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("nemo_patches"):
                found.add(method)
            return original(*arguments)

        return noted

    for method in ("set", "get", "add", "check", "multi_get", "compare_set"):
        setattr(
            dist.PrefixStore, method, noting(method, getattr(dist.PrefixStore, method))
        )
    encoders.sync(encoder, 150)
    if rank == 0:
        encoders.sync(encoder, 200)
        wait_until(lambda: nemo_patches.status().stalls)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("rank 0 has said so", "")
    store.wait(["rank 0 has said so"])
    if rank == 1:
        encoders.sync(encoder, 200)
    dist.barrier()
    return found


def test_once_connected_nobody_of_us_asks_the_store() -> None:
    for result in run_ranks(asked, 2):
        assert result.value == set()
