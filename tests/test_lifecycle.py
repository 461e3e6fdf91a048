"""Process groups that come and go, ranks that cannot connect, signals during a wait, and nothing
left behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import (
    Said,
    all_have_come,
    come_in,
    forget_incidents,
    free_port,
    join_group,
    run_ranks,
    wait_for_others,
    wait_until,
    waits_for_a_round,
)

import nemo_patches

pytestmark = pytest.mark.one_nemo  # of Gloo and processes, not of NeMo's version


def groups_come_and_go(rank: int, size: int, ports: list[int]) -> Any:
    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    found = []
    encoders.sync(encoder, 50)  # no process group yet
    found.append((encoder.max_audio_length, len(nemo_patches.status().encoders)))
    for generation, port in enumerate(ports):
        join_group(rank, size, port)
        before = resources()
        for step in range(3):
            encoders.sync(encoder, 100 * (generation + 1) + 10 * step + rank)
        found.append(
            (encoder.max_audio_length, nemo_patches.status().encoders[0].rounds)
        )
        dist.barrier()
        found.append(
            "nemo_patches exchange" in {thread.name for thread in threading.enumerate()}
        )
        dist.destroy_process_group()
        # Threads and sockets end a little later.
        wait_until(lambda before=before: no_more_than(before))
    encoders.sync(encoder, 2000)
    found.append((encoder.max_audio_length, 0))
    return found


def no_more_than(
    before: tuple[int, int, int], threads: int = 0, files: int = 0
) -> bool:
    now = resources()
    return now[0] <= before[0] + threads and now[1] <= before[1] + files


def resources() -> tuple[int, int, int]:
    """Threads and open files of this process, and the MiB of memory that it holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        pages * 4 // 1024,
    )


def test_a_new_process_group_starts_afresh_and_an_old_one_leaves_nothing() -> None:
    results = run_ranks(groups_come_and_go, 2, [free_port(), free_port()], group=False)
    for result in results:
        none, first, gone, second, gone_again, alone = result.value
        assert none == (60, 0)
        assert first == (121, 3)
        assert second == (221, 3)
        assert gone is gone_again is True
        assert alone == (2000, 0)
        assert result.lines("WARNING") == result.lines("ERROR") == []


def alone(rank: int, size: int) -> Any:
    nemo_patches.apply()
    encoder = encoders.conformer()
    before = os.listdir("/proc/self/task")
    seconds = encoders.sync(encoder, 500)
    return (
        seconds,
        encoder.max_audio_length,
        len(os.listdir("/proc/self/task")) - len(before),
    )


def test_a_world_of_one_does_nothing() -> None:
    (result,) = run_ranks(alone, 1)
    seconds, maximum, new_threads = result.value
    assert seconds < 5  # no wait of 10 s
    assert (maximum, new_threads) == (500, 0)


def without_an_address(rank: int, size: int) -> Any:
    if rank == 1:
        # Read where we connect; the default group is there.
        os.environ["GLOO_SOCKET_IFNAME"] = "no_such_interface"
    nemo_patches.apply(timeout=20.0)
    encoder = encoders.conformer()
    seconds = [encoders.sync(encoder, 100 * (step + 1) + rank) for step in range(3)]
    dist.barrier()
    return seconds, encoder.max_audio_length


def test_a_rank_that_cannot_connect_is_named_and_nobody_waits_for_it() -> None:
    results = run_ranks(without_an_address, 2)
    for rank, result in enumerate(results):
        seconds, maximum = result.value
        assert sum(seconds) < 15  # no wait of 20 s
        assert maximum == 300 + rank
        (line,) = result.lines("the length sync has ended")
        assert "rank 1" in line
        assert "no_such_interface" in line


def without_a_cpu_backend(rank: int, size: int, port: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=size)
    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    encoders.sync(encoder, 100 * (rank + 1))
    return encoder.max_audio_length


def test_a_default_group_without_a_cpu_backend() -> None:
    results = run_ranks(without_a_cpu_backend, 2, free_port(), group=False)
    assert [result.value for result in results] == [200, 200]


def with_a_file_store(rank: int, size: int, path: str) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size
    )
    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    encoders.sync(encoder, 100 * (rank + 1))
    come_in(encoder)
    nemo_patches.apply(timeout=1.0)
    said = Said()
    dist.barrier()
    if rank == 0:
        encoders.sync(encoder, 100)
        wait_until(lambda: any("Missing: " in line for line in said.lines))
    wait_for_others("reported", 2)
    return encoder.max_audio_length, said.lines


def test_a_file_store(tmp_path: Path) -> None:
    results = run_ranks(with_a_file_store, 2, str(tmp_path / "store"), group=False)
    assert [result.value[0] for result in results] == [200, 200]
    (line,) = results[0].value[1]
    assert re.search(
        r"Missing: rank 1 of 2 \| rank 1 \(.*\) is elsewhere: .* its last encoder call,"
        r" 1, began ",
        line,
    )


def without_store_clone(rank: int, size: int) -> Any:
    for owner in dist.PrefixStore.__mro__:
        if "clone" in vars(owner):
            del owner.clone  # older torch does not have it
    assert not hasattr(dist.PrefixStore, "clone")
    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    seconds = encoders.sync(encoder, 100 * (rank + 1))
    dist.barrier()
    return encoder.max_audio_length, seconds < 15  # no wait of 30 s


def test_a_store_that_cannot_be_cloned() -> None:
    assert [result.value for result in run_ranks(without_store_clone, 2)] == [
        (200, True)
    ] * 2


class Stopped(RuntimeError):
    """What a user's SIGTERM handler may raise; not to be taken for an error of Gloo's or of ours."""


def interrupted(rank: int, size: int, number: int) -> Any:
    def stop(*_: object) -> None:
        raise Stopped

    nemo_patches.apply(timeout=20.0)
    encoder = encoders.conformer()
    found = []
    if number == signal.SIGTERM:
        signal.signal(number, stop)
    else:
        signal.signal(number, signal.default_int_handler)
    for connected in (False, True):
        if connected:
            dist.barrier()
            if rank == 1:
                encoders.sync(encoder, 100)  # the call in which rank 0 was interrupted
            forget_incidents()  # in step again
        dist.barrier()
        if rank == 0:
            sent = []

            def send(sent: list[float] = sent) -> None:
                wait_until(waits_for_a_round)
                sent.append(time.monotonic())
                os.kill(os.getpid(), number)

            threading.Thread(target=send).start()
            try:
                encoders.sync(encoder, 100)
                found.append(("not interrupted", 0.0))
            except (Stopped, KeyboardInterrupt) as error:
                found.append((type(error).__name__, time.monotonic() - sent[0]))
    dist.barrier()
    return found


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_act_during_a_wait(number: int) -> None:
    first, _ = run_ranks(interrupted, 2, number)
    names = {"KeyboardInterrupt"} if number == signal.SIGINT else {"Stopped"}
    assert {name for name, _ in first.value} == names
    assert len(first.value) == 2
    assert all(delay < 5 for _, delay in first.value)  # no wait to its end, at 20 s


def destroyed_in_a_wait(
    rank: int, size: int, ports: list[int], where: str, folder: str
) -> Any:
    nemo_patches.apply(timeout=100.0)
    encoder = encoders.conformer()
    done = Path(folder, "done")
    join_group(rank, size, ports[0])
    # It keeps the process group.
    wrapped = torch.nn.parallel.DistributedDataParallel(encoder)
    if rank == 1:
        wait_until(done.exists)  # never comes to the call
        dist.destroy_process_group()
        seconds = 0.0
    else:
        signal.signal(signal.SIGUSR1, lambda *_: dist.destroy_process_group())

        def destroy() -> None:
            wait_until(waits_for_a_round)
            if where == "a thread":
                dist.destroy_process_group()
            elif where == "a signal handler":
                os.kill(os.getpid(), signal.SIGUSR1)
            else:  # the kernel interrupts that one, and not the thread that waits and has to run the handler
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

        thread = threading.Thread(target=destroy)
        thread.start()
        seconds = encoders.sync(encoder, 100)
        thread.join()
        done.touch()
    during = encoder.max_audio_length
    assert wrapped.module is encoder
    join_group(rank, size, ports[1])
    for step in range(3):
        encoders.sync(encoder, 200 + 10 * step + rank)
    dist.barrier()
    return (
        seconds,
        during,
        encoder.max_audio_length,
        nemo_patches.status().encoders[0].timeouts,
    )


@pytest.mark.parametrize(
    "where", ["a thread", "a signal handler", "a handler of a signal to another thread"]
)
def test_a_process_group_that_is_destroyed_during_a_wait(
    where: str, tmp_path: Path
) -> None:
    """The call goes on with its own length at once, and the next process group syncs."""
    results = run_ranks(
        destroyed_in_a_wait,
        2,
        [free_port(), free_port()],
        where,
        str(tmp_path),
        group=False,
    )
    for rank, result in enumerate(results):
        seconds, during, last, timeouts = result.value
        assert seconds < 50  # not the timeout
        assert during == (60 if rank else 100)
        assert (last, timeouts) == (221, 0)
        assert result.lines("ERROR") == []


def destroyed_as_the_first_call_begins(rank: int, size: int, ports: list[int]) -> int:
    """By another thread, as it seems to the call."""
    from nemo_patches.sync.encoder_rounds import NoNotes, listeners

    class OtherThread(NoNotes):
        def call_began(self, encoder: Any, sync: Any) -> None:
            dist.destroy_process_group()

    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    join_group(rank, size, ports[0])
    notes, listeners.notes = listeners.notes, OtherThread()
    encoders.sync(encoder, 100)
    listeners.notes = notes
    join_group(rank, size, ports[1])
    encoders.sync(encoder, 200 + rank)
    wait_until(all_have_come)  # so there is a stall monitor
    dist.barrier()
    return encoder.max_audio_length


def test_a_process_group_that_is_destroyed_as_the_first_call_begins() -> None:
    results = run_ranks(
        destroyed_as_the_first_call_begins, 2, [free_port(), free_port()], group=False
    )
    assert [result.value for result in results] == [201, 201]
    assert [result.lines("ERROR") for result in results] == [[], []]


class Handlers:
    """What a user may give signal.signal."""

    def method(self, *_: object) -> None:
        raise Stopped

    def __call__(self, *_: object) -> None:
        raise Stopped


@pytest.mark.parametrize(
    "handler",
    [
        lambda *_: Handlers().method(),
        Handlers().method,
        Handlers(),
        functools.partial(Handlers().method, 1),
    ],
)
def test_an_exception_of_a_signal_handler_is_told_from_our_own(handler: Any) -> None:
    from nemo_patches.sync.rank_log import raised_by_signal_handler

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Stopped) as from_handler:
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(ZeroDivisionError) as our_own:
            print(1 / 0)
        assert raised_by_signal_handler(from_handler.value)
        assert not raised_by_signal_handler(our_own.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def dropped_on_one(rank: int, size: int, folder: str) -> list[int]:
    """Rank 1 drops an encoder whose round it has issued; rank 0 comes to it only then, and keeps
    it.
    """
    from nemo_patches.sync import length_sync

    nemo_patches.apply(timeout=4.0)
    dropped = Path(folder, "dropped")
    first = encoders.conformer()
    if rank == 1:
        encoders.sync(first, 100)
        del first
        gc.collect()
        dropped.touch()
    else:
        wait_until(dropped.exists)
        encoders.sync(first, 100)
    group_syncs = length_sync.process.group_syncs
    assert group_syncs is not None
    # As come_in does: else rank 1 may issue no round at the next call, for which rank 0 waits.
    wait_until(group_syncs.rounds(length_sync.LENGTHS).rounds.has_come)
    dist.barrier()
    second = encoders.conformer()
    found = []
    for step in range(8):
        encoders.sync(second, 200 + 10 * step + rank)
        found.append(second.max_audio_length - 10 * step)
        come_in(second)
    return found


@pytest.mark.alone
def test_an_encoder_that_one_rank_drops_does_not_hold_up_the_next(
    tmp_path: Path,
) -> None:
    for result in run_ranks(dropped_on_one, 2, str(tmp_path)):
        assert result.value[-1] == 201


def test_two_threads_first_calls_of_an_encoder_share_one_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemo_patches.sync import length_sync

    both = threading.Barrier(2)
    exchanges: list[length_sync.Exchange] = []

    class SlowExchange(length_sync.Exchange):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            exchanges.append(self)
            # The other thread does not come, as it should.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)

    monkeypatch.setattr(length_sync, "Exchange", SlowExchange)
    process, encoder = length_sync.ProcessSync(), torch.nn.Linear(1, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(process.sync_of, [encoder, encoder]))
    finally:
        dist.destroy_process_group()
    assert len(exchanges) == 1


def forked_under_the_lock(rank: int, size: int) -> int:
    from nemo_patches.sync import length_sync

    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    encoders.sync(encoder, 100)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        group_syncs = length_sync.process.group_syncs
        assert group_syncs is not None
        with length_sync.process._lock, group_syncs.turn.take(timedelta(seconds=60)):
            held.set()
            forked.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        encoders.sync(encoder, 200)
        os._exit(0)
    forked.set()
    holder.join()
    return os.waitpid(child, 0)[1]


def test_a_child_forked_while_another_thread_calls_an_encoder_can_call_one() -> None:
    assert [result.value for result in run_ranks(forked_under_the_lock, 2)] == [0, 0]


def forked_before_the_first_call(rank: int, size: int) -> int:
    nemo_patches.apply(timeout=20.0)
    encoder = encoders.conformer()
    childs_end, parents_end = socket.socketpair()
    if rank == 1:
        if os.fork() == 0:
            signal.alarm(60)
            parents_end.close()
            encoders.sync(encoder, 500)
            childs_end.send(b"called")
            childs_end.recv(1)  # until its parent has ended
            os._exit(0)
        parents_end.recv(6)
    encoders.sync(encoder, 100 + rank)
    return encoder.max_audio_length


def test_a_child_forked_before_its_parents_first_call_does_not_take_its_place() -> None:
    results = run_ranks(forked_before_the_first_call, 2)
    assert [result.value for result in results] == [101, 101]
    (line,) = [
        line
        for result in results
        for line in (*result.lines("WARNING"), *result.lines("ERROR"))
    ]
    assert (
        "uses its own lengths from now on: this process was forked from the rank's own"
        in line
    )


def without_a_free_thread(rank: int, size: int, folder: str) -> None:
    if rank == 1:
        threading.stack_size(1 << 50)  # no thread can be started
    nemo_patches.apply(timeout=2.0, trace=folder)
    encoder = encoders.conformer()
    for length in (100, 200):
        encoders.sync(encoder, length)
    assert encoder.max_audio_length == 200


def test_where_no_thread_can_be_started_that_is_said_and_training_goes_on(
    tmp_path: Path,
) -> None:
    _, result = run_ranks(without_a_free_thread, 2, str(tmp_path))
    lines = [*result.lines("WARNING"), *result.lines("ERROR")]
    assert len(lines) == 3
    assert all(
        "can't start new thread" in line and "please report it" not in line
        for line in lines
    )


def many_encoders(rank: int, size: int) -> Any:
    from nemo_patches.sync.length_sync import synced_length

    nemo_patches.apply(timeout=20.0)
    encoder = encoders.conformer()
    synced_length(encoder, 5)

    before = middle = resources()
    for number in range(1000):
        # What the sync keeps does not depend on the encoder's own size.
        dropped = torch.nn.Linear(1, 1)
        assert synced_length(dropped, 10 + rank) == 10 + size - 1
        del dropped
        if number == 500:
            middle = resources()
    # They end a little later.
    wait_until(lambda: no_more_than(before, threads=4, files=6))
    return resources()[2] - middle[2]


def test_a_thousand_encoders_leave_nothing_behind() -> None:
    for result in run_ranks(many_encoders, 2, limit=500):
        assert result.value < 15, "MiB"
        assert result.lines("WARNING") == result.lines("ERROR") == []
