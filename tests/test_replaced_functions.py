"""A script puts classes and functions of its own in the place of Python's: the watch goes on."""

from __future__ import annotations

import socket
import time
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import (
    all_have_come,
    free_port,
    in_step,
    join_group,
    run_ranks,
    stall_monitor,
    wait_until,
)

import nemo_patches

pytestmark = pytest.mark.one_nemo
CALLS = 20


def refuse(*_: object, **__: object) -> Any:
    raise PermissionError("no network in this script")


class Refuses(socket.socket):
    def connect(self, *_: object) -> None:
        refuse()

    connect_ex = bind = listen = send = accept = connect  # type: ignore[assignment]


class NoSocket:
    def __init__(self, *_: object, **__: object) -> None:
        refuse()


def with_replaced(rank: int, size: int, port: int, by: type[Any]) -> tuple[int, bool]:
    """Rounds that came in time, and whether diagnose can ask this rank."""
    before = socket.socket
    socket.socket = by  # type: ignore[misc]
    for name in ("getaddrinfo", "create_server", "create_connection", "gethostname"):
        setattr(socket, name, refuse)
    slept, time.sleep = time.sleep, refuse
    nemo_patches.apply(timeout=30.0)
    join_group(rank, size, port)
    encoder = encoders.conformer()
    for _ in range(CALLS):
        encoders.sync(encoder, 100 + rank)
        dist.barrier()
    time.sleep = slept  # for this test itself
    wait_until(all_have_come)
    (counters,) = nemo_patches.status().encoders
    has_socket = stall_monitor().visitors.socket is not None
    dist.barrier()
    socket.socket = before  # type: ignore[misc]
    return counters.rounds - counters.timeouts, has_socket


@pytest.mark.parametrize("by", [Refuses, NoSocket])
def test_the_watch_needs_nothing_of_pythons_socket_module(by: type[Any]) -> None:
    for result in run_ranks(with_replaced, 2, free_port(), by, group=False):
        assert result.value == (CALLS, True)
        assert result.lines("WARNING") == result.lines("ERROR") == []


def notes_that_fail(rank: int, size: int, port: int) -> tuple[bool, list[int]]:
    """Whether the next process group is watched, and its encoder's calls are noted."""
    from nemo_patches.watch import subscriber
    from nemo_patches.watch.training_notes import TrainingNotes

    encoder = in_step(timeout=30.0)
    original = TrainingNotes.call_began
    TrainingNotes.call_began = refuse  # type: ignore[method-assign]  # any bug of ours
    encoders.sync(encoder, 100)
    TrainingNotes.call_began = original  # type: ignore[method-assign]
    dist.barrier()
    first = stall_monitor()
    dist.destroy_process_group()
    join_group(rank, size, port)
    wait_until(
        lambda: subscriber.monitor() is not first and stall_monitor().exchange.is_whole
    )
    encoders.sync(encoder, 100)
    encoders.sync(encoder, 100)
    dist.barrier()
    wait_until(lambda: stall_monitor().progress.has_started)
    noted = [
        sync.group is stall_monitor().group for sync in subscriber.process._notes._syncs
    ]
    dist.barrier()
    return True in noted, [subscriber.process._notes.last.calls]


def test_a_process_group_after_an_error_in_a_note_is_watched() -> None:
    for result in run_ranks(notes_that_fail, 2, free_port()):
        is_noted, (calls,) = result.value
        assert is_noted
        assert calls >= 4
        (line,) = result.lines("ERROR")
        assert "what the stall monitor notes has ended by an error of its own" in line
