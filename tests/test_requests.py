"""Idle by design is no stall: a rank waits for a person or a request, and the others for it; on
real ranks. When it is one, test_stall_decisions.py has.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import Given, Job, Result, all_have_come, beside_others, wait_until
from torch.utils.data import DataLoader, IterableDataset

import nemo_patches
from nemo_patches.watch import stacks
from nemo_patches.watch.exits import EXIT_CODE
from nemo_patches.watch.kernel_call import KernelCall

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT, STALL_EXIT = 0.5, 1.0
IDLE_S = 6.0  # longer than ten times stall_timeout, after which any other wait ends a process
ASKED = 0  # the rank


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


def serves(rank: int, size: int, folder: str) -> None:
    """Two requests: on a busy machine a rank may first be seen on its way."""
    begin(on_stall=f"touch {folder}/page")
    for _ in range(2):
        if rank == ASKED:
            requests = queue.Queue[str]()
            threading.Timer(IDLE_S, requests.put, ["one"]).start()
            requests.get()
        dist.broadcast_object_list([None], src=ASKED)


@beside_others(Job(serves, 2, Given.FOLDER, limit=120))
def test_a_server_without_requests_is_said_once_and_is_neither_paged_nor_ended(
    results: list[Result], folder: Path
) -> None:
    for result in results:
        assert not result.lines("nemo_patches WARNING")
        assert not result.lines("nemo_patches ERROR")
        (line,) = result.lines("INFO", "s. rank 0 (", "waits for a request: ")
        assert ") waits for a request: queue.get() in serves (test_requests.py:" in line
        assert " | rank 1 (" in line
    assert not (folder / "page").exists()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield queue.Queue[int]().get()


def waits_in_a_loader_for_what_others_broadcast(rank: int, size: int) -> None:
    begin()
    if rank == ASKED:
        next(iter(DataLoader(Stream())))
    dist.broadcast_object_list([None], src=ASKED)


@beside_others(
    Job(waits_in_a_loader_for_what_others_broadcast, 2, limit=120, dies=(0, 1))
)
def test_torchs_loader_is_no_server_whatever_the_others_wait_in(
    results: list[Result],
) -> None:
    assert any(result.exit_code == EXIT_CODE for result in results)
    for result in results:
        assert result.lines("WARNING", f" s. rank {ASKED} (", "_for_what_others_bro")
        assert not result.lines("waits for a request")


def an_input() -> None:
    input("Go on? ")


def a_console() -> None:
    with contextlib.suppress(SystemExit):
        code.interact(local={})


def a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.accept()


def a_server() -> None:
    address = ("127.0.0.1", 0)
    with socketserver.TCPServer(address, socketserver.BaseRequestHandler) as server:
        server.serve_forever()


def an_event_loop() -> None:
    async def serve() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0):
            await asyncio.Event().wait()

    asyncio.run(serve())


WAYS: dict[Callable[[], None], str] = {
    an_input: "input()",
    a_console: "input()",
    a_socket: "accept()",
    a_server: "serve_forever()",
    an_event_loop: "perhaps asyncio's loop",
}


def each_way(rank: int, size: int) -> dict[str, str]:
    """Each in a thread of a process that has a terminal."""
    person, own = os.openpty()
    os.dup2(own, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    found = {}
    for way in WAYS:
        thread = threading.Thread(target=way, daemon=True)
        thread.start()

        def asks(thread: threading.Thread = thread) -> str:
            return stacks.occupation(thread.ident or 0, thread.native_id or 0).request

        wait_until(asks)
        found[way.__name__] = asks()
        if way in (an_input, a_console):  # one at a time reads the terminal
            os.write(person, b"raise SystemExit\n")
            thread.join(60)
    return found


@beside_others(Job(each_way, 1, group=False))
def test_what_a_thread_waits_in_for_a_person_or_a_request(
    results: list[Result],
) -> None:
    assert results[0].value == {way.__name__: WAYS[way] for way in WAYS}


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
