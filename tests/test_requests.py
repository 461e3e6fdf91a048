"""Idle by design is no stall: a rank waits for a person or a request, and the others for it; on
real ranks.
"""

from __future__ import annotations

import asyncio
import code
import contextlib
import functools
import os
import queue
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import Given, Job, Result, all_have_come, beside_others, wait_until
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import nemo_patches
from nemo_patches.watch import stacks
from nemo_patches.watch.exits import EXIT_CODE
from nemo_patches.watch.kernel_call import KernelCall

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT, STALL_EXIT = 0.5, 1.0
IDLE_S = 8.0  # longer than ten times stall_timeout, after which any other wait ends a process
ASKED = 0  # the rank


class Later:
    """Something that is done once this rank has been idle for long."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        end = time.monotonic() + IDLE_S
        wait_until(lambda: time.monotonic() > end)
        self.act()


def terminal() -> int:
    """A terminal as standard input; who writes to the file that this returns is the person there."""
    person, own = os.openpty()
    os.dup2(own, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    return person


def a_queue() -> None:
    requests = queue.Queue[str]()
    Later(lambda: requests.put("one"))
    requests.get()


def an_input() -> None:
    person = terminal()
    Later(lambda: os.write(person, b"go on\n"))
    input("Go on? ")


def a_console() -> None:
    person = terminal()
    Later(lambda: os.write(person, b"raise SystemExit\n"))
    with contextlib.suppress(SystemExit):
        code.interact(local={})


def a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Later(lambda: socket.create_connection(listener.getsockname()).close())
        listener.accept()


def a_server() -> None:
    with socketserver.TCPServer(
        ("127.0.0.1", 0), socketserver.BaseRequestHandler
    ) as server:
        Later(server.shutdown)
        server.serve_forever()


def an_event_loop() -> None:
    async def serve() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            await asyncio.sleep(IDLE_S)

    asyncio.run(serve())


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "queue.get()": (a_queue, "queue.get() in a_queue (test_requests.py:"),
    "input()": (an_input, "input() in an_input (test_requests.py:"),
    "code.interact()": (a_console, "input() in a_console (test_requests.py:"),
    "accept()": (a_socket, "accept() in a_socket (test_requests.py:"),
    "serve_forever()": (a_server, "serve_forever() in a_server (test_requests.py:"),
    "asyncio": (an_event_loop, "asyncio's loop in an_event_loop (test_requests.py:"),
}


def begin(**settings: Any) -> None:
    """Every rank is in step, and from now on the watch is at its strictest."""
    nemo_patches.apply(stall_timeout=0)
    encoder = encoders.conformer()
    for _ in range(2):
        encoders.sync(encoder, 80)
        dist.barrier()
    wait_until(all_have_come)
    dist.barrier()
    nemo_patches.apply(stall_timeout=STALL_TIMEOUT, stall_exit=STALL_EXIT, **settings)


def serves(rank: int, size: int, way: str, folder: str) -> None:
    """Two requests, one after the other."""
    begin(on_stall=f"touch {folder}/page")
    for _ in range(2):
        if rank == ASKED:
            WAYS[way][0]()
        dist.broadcast_object_list([None], src=ASKED)


@beside_others(*(Job(serves, 2, way, Given.FOLDER, limit=120) for way in WAYS))
def test_a_server_without_requests_is_said_once_and_is_neither_paged_nor_ended(
    results: list[Result], job: Job, folder: Path
) -> None:
    (way,) = job.settings
    for result in results:
        assert not result.lines("nemo_patches WARNING")
        assert not result.lines("nemo_patches ERROR")
        (line,) = result.lines("INFO", "s. rank 0 (", "waits for a request: ")
        assert f") waits for a request: {WAYS[way][1]}" in line
        assert " | rank 1 (" in line
    assert not (folder / "page").exists()


def own_reader(job: Any) -> None:
    """A queue that a thread of the user's own fills, in training: the others wait for gradients."""
    queue.Queue[int]().get()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield queue.Queue[int]().get()


def a_loader(job: Any) -> None:
    next(iter(DataLoader(Stream())))


def prefetches(rank: int, size: int, loads: Callable[[Any], None]) -> None:
    begin()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for step in range(3):
        if rank == ASKED and step == 2:
            loads(None)
        model(torch.ones(1)).sum().backward()


@beside_others(
    *(
        Job(prefetches, 2, loads, limit=120, dies=(0, 1))
        for loads in (own_reader, a_loader)
    )
)
def test_a_reader_that_waits_for_its_data_is_a_stall_and_is_ended(
    results: list[Result], job: Job
) -> None:
    (loads,) = job.settings
    assert any(result.exit_code == EXIT_CODE for result in results)
    for result in results:
        assert result.lines("WARNING", f" s. rank {ASKED} (", f"{loads.__name__} (")
        assert not result.lines("waits for a request")


def waits_in_a_loader_for_what_others_broadcast(rank: int, size: int) -> None:
    begin()
    if rank == ASKED:
        a_loader(None)
    dist.broadcast_object_list([None], src=ASKED)


@beside_others(
    Job(waits_in_a_loader_for_what_others_broadcast, 2, limit=120, dies=(0, 1))
)
def test_torchs_loader_is_no_server_whatever_the_others_wait_in(
    results: list[Result],
) -> None:
    assert any(result.exit_code == EXIT_CODE for result in results)
    assert all(
        result.lines("WARNING", f" s. rank {ASKED} (", "a_loader (")
        for result in results
    )


def in_file(path: str, function: str) -> Callable[[Callable[[], object]], object]:
    """A function of this name in such a file, which calls what it is given."""
    names: dict[str, Any] = {}
    exec(compile(f"def {function}(call): return call()", path, "exec"), names)
    called: Callable[[Callable[[], object]], object] = names[function]
    return called


PACKAGES = "/x/site-packages"


@pytest.mark.parametrize(
    ("callers", "request_"),
    [
        ([(f"{PACKAGES}/tornado/platform/asyncio.py", "start")], "tornado's loop"),
        ([(f"{PACKAGES}/uvicorn/server.py", "run")], "uvicorn's loop"),
        ([(f"{PACKAGES}/grpc/_server.py", "wait_for_termination")], "grpc's loop"),
        ([(f"{PACKAGES}/grpc/_channel.py", "result")], ""),
        ([(f"{PACKAGES}/wandb/sdk/wandb_init.py", "init")], ""),
        ([(f"{PACKAGES}/torch/utils/data/dataloader.py", "_try_get_data")], ""),
        (
            [
                (f"{PACKAGES}/lightning/pytorch/loops/fetchers.py", "__next__"),
                ("/my/data.py", "read"),
            ],
            "",
        ),
        ([("/my/serve.py", "main")], "perhaps queue.get()"),
        (
            [
                (f"{PACKAGES}/ipykernel/kernelapp.py", "start"),
                ("/tmp/ipykernel_7/1.py", "cell"),
            ],
            "perhaps queue.get()",
        ),
    ],
)
def test_whose_wait_it_is_decides(
    callers: list[tuple[str, str]], request_: str
) -> None:
    """callers: the outermost first; the last of them is in queue.get()."""
    requests = queue.Queue[int]()
    work: Callable[[], object] = requests.get
    for path, function in reversed(callers):
        work = functools.partial(in_file(path, function), work)
    thread = threading.Thread(target=work)
    thread.start()
    wait_until(
        lambda: (
            requests.get.__code__
            in [frame.code for frame in stacks.seen(thread.ident or 0)]
        )
    )
    found = stacks.occupation(thread.ident or 0, thread.native_id or 0).request
    requests.put(1)
    thread.join(60)
    assert found == request_


def test_a_process_that_the_kernel_tells_nothing_of_asks_nobody() -> None:
    assert not KernelCall().reads_standard_input
    assert not KernelCall("read", 3).reads_standard_input
