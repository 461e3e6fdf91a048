"""Connections of the side channel that are lost and come back: every round comes, with its value, on every rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hosts import ADDRESSES, CABLES, HOSTS, ip, move_to, two_hosts
from light_ranks import LONG, SOON_S, Exit, Rank, listeners, reset_some, run
from ranks import wait_until

from nemo_patches.channel import keys, links, tree
from nemo_patches.channel.extremes import ExtremesRounds
from nemo_patches.channel.side_channel import RoundFailed

SHORT = timedelta(seconds=0.4)
LEAF, INNER, ROOT = 4, 1, 0  # 0 -> 1, 2; 1 -> 3, 4; 2 -> 5, 6
VICTIMS = pytest.mark.parametrize("victims", [(LEAF,), (INNER,), (ROOT,), (0, 1, 2, 3, 4, 5, 6)])

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def count_connections_to_the_store(rank: Rank) -> list[float]:
    """When this rank has made one; filled from now on."""
    made, connect = list[float](), rank.channel._job_store.connect

    def counted() -> Any:
        made.append(time.monotonic())
        return connect()

    rank.channel._job_store.connect = counted  # type: ignore[method-assign]
    return made


def is_whole(rank: Rank) -> bool:
    channel = rank.channel
    return len(channel.links.connections) == len(channel.links.place.children) + (rank.number > 0)


def door_of(rank: Rank, other: int) -> tuple[str, int, str]:
    import torch.distributed as dist

    part = dist.PrefixStore("0", dist.PrefixStore(keys.PREFIX, rank.store))
    address, port, token = json.loads(part.get(keys.DOOR.format(rank=other)))
    return address, port, token


# Reset once


def reset_while_idle(rank: Rank, victims: tuple[int, ...]) -> None:
    rank.hold_rounds()
    made = count_connections_to_the_store(rank)
    for number in range(5):
        rank.meet(f"in step {number}")
        if rank.number in victims:
            reset_some(rank.channel)
        rank.hold_rounds(10)
    rank.meet("the end")
    assert not made
    wait_until(lambda: not listeners())
    assert len(rank.said) <= 1 and all("no round is lost" in line for line in rank.said), rank.said
    rank.meet("seen")


@VICTIMS
def test_connections_that_are_reset_between_rounds_come_back_without_the_store(victims: tuple[int, ...]) -> None:
    run(reset_while_idle, 7, victims)


def reset_in_a_round(rank: Rank, victims: tuple[int, ...], late: int) -> None:
    rank.hold_rounds()
    for number in range(5):
        first = rank.rounds.done
        if rank.number != late:
            rank.rounds.issue(10 * first + rank.number)
        rank.meet(f"under way {number}")
        if rank.number in victims:
            reset_some(rank.channel)
        if rank.number == late:
            rank.rounds.issue(10 * first + rank.number)
        assert rank.rounds.wait(LONG) == 10 * first + rank.size - 1
    rank.meet("the end")


@VICTIMS
@pytest.mark.parametrize("late", [LEAF, ROOT])
def test_connections_that_are_reset_in_a_round_come_back(victims: tuple[int, ...], late: int) -> None:
    run(reset_in_a_round, 7, victims, late)


# Again and again


@contextlib.contextmanager
def resets(rank: Rank, period_s: float) -> Iterator[None]:
    """Some connection of this rank's, every so often."""
    ended, chance = threading.Event(), random.Random(rank.number)

    def go_on() -> None:
        while not ended.wait(period_s):
            if neighbours := sorted(rank.channel.links.connections):
                reset_some(rank.channel, [chance.choice(neighbours)])

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def reset_for_a_while(rank: Rank, seconds: float, period_s: float, keys_: int) -> int:
    """Rounds of several keys, in the same order on all ranks, until rank 0 has had enough."""
    all_rounds = [rank.channel.rounds(f"encoder {number}") for number in range(keys_)]
    rank.hold_rounds()
    end, enough, number = time.monotonic() + seconds, 1 << 40, 0
    with resets(rank, period_s):
        while True:
            over = rank.number == 0 and time.monotonic() > end
            for index, rounds in enumerate(all_rounds):
                rounds.issue((number * keys_ + index) * rank.size + rank.number + enough * over)
            results = [rounds.wait(LONG) for rounds in all_rounds]
            came = [rounds.came_at for rounds in all_rounds]
            assert came == sorted(came), came
            assert None not in results
            highest = [number * keys_ + index for index in range(keys_)]
            assert [(result or 0) % enough // rank.size for result in results] == highest
            number += 1
            if (results[0] or 0) >= enough:
                assert all(result >= enough for result in results if result is not None)
                break
            assert results == [one * rank.size + rank.size - 1 for one in highest]
    rank.hold_rounds()
    rank.meet("the end")
    return number


@pytest.mark.parametrize("period_s", [0.05, 0.005])
def test_every_rank_resets_a_connection_every_few_milliseconds_and_no_round_is_wrong(period_s: float) -> None:
    ended = run(reset_for_a_while, 7, 4.0, period_s, 3)
    assert min(rank.value for rank in ended) > 3


def test_64_ranks_with_resets_at_random() -> None:
    ended = run(reset_for_a_while, 64, 6.0, 0.5, 2, fan_out=4)
    assert min(rank.value for rank in ended) > 3


def passes_that_end_together(rank: Rank) -> None:
    extremes = ExtremesRounds(rank.channel, "loader")
    with resets(rank, 0.02):
        for number in range(300):
            extremes.issue(100 * number + rank.number)
            highest, lowest = ((100 * number + one, one) for one in (rank.size - 1, 0))
            assert extremes.wait(LONG) == (highest, lowest)
    rank.meet("the end")


def test_passes_that_end_together_go_on() -> None:
    run(passes_that_end_together, 7)


def all_at_once(rank: Rank) -> float:
    rank.hold_rounds()
    made = count_connections_to_the_store(rank)
    rank.meet("in step")
    reset_some(rank.channel)
    began = time.monotonic()
    rank.hold_rounds(1)
    took = time.monotonic() - began
    rank.meet("the end")
    # At the most one for each second that a busy machine has taken.
    assert len(made) <= took + 1
    return took


def test_a_switch_that_blinks_for_64_ranks_is_no_storm_at_the_store() -> None:
    assert max(rank.value for rank in run(all_at_once, 64, fan_out=16)) < SOON_S


# Who has gone, who has left, and who only does not answer


def killed_with_a_reset(rank: Rank, victim: int, pause_s: float) -> float:
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == victim:
        reset_some(rank.channel)
        time.sleep(pause_s)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RoundFailed, match=f"rank {victim} has gone"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    assert not any("lost" in line and "no round is lost" not in line for line in rank.said), rank.said
    return time.monotonic() - began


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("victim", [LEAF, INNER, ROOT])
def test_a_rank_that_is_killed_while_its_connections_come_back_has_gone(victim: int, pause_s: float) -> None:
    ended = run(killed_with_a_reset, 7, victim, pause_s, dies=(victim,))
    assert all(rank.value < SOON_S for rank in ended if rank.value is not None)


def leaves_with_a_reset(rank: Rank, victim: int, how: str) -> Any:
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == victim:
        reset_some(rank.channel)
        if how == "exit":
            return Exit(7)
        rank.channel.stop("the process group was destroyed", leaves=True)
        rank.channel.join(LONG)
    else:
        with pytest.raises(RoundFailed, match=f"rank {victim} has left"):
            rank.rounds.issue(rank.number)
            rank.rounds.wait(LONG)
    rank.meet("the end", rank.size - (how == "exit"))
    return None


@pytest.mark.parametrize("how", ["exit", "destroyed"])
@pytest.mark.parametrize("victim", [LEAF, INNER, ROOT])
def test_a_rank_that_leaves_while_its_connections_come_back_has_left(victim: int, how: str) -> None:
    run(leaves_with_a_reset, 7, victim, how)


def stopped_with_a_reset(rank: Rank, victim: int) -> None:
    links.GONE_AFTER_S = 1.0
    rank.hold_rounds()
    if rank.number == victim:
        rank.store.set("pid", str(os.getpid()))
        rank.meet("in step")
        with rank.channel.lock:  # so it does not knock before it is stopped
            reset_some(rank.channel)
            os.kill(os.getpid(), signal.SIGSTOP)
        rank.rounds.issue(rank.number)
    else:
        rank.meet("in step")
        pid = int(rank.store.get("pid"))
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        rank.rounds.issue(rank.number)
        neighbours = {rank.channel.links.place.parent, *rank.channel.links.place.children}
        if victim in neighbours:
            wait_until(lambda: rank.said)
            assert f"connection to rank {victim} is lost: calls wait in vain" in rank.said[0]
        assert rank.rounds.wait(SHORT) is None
        rank.meet("the others gave up", rank.size - 1)
        if rank.number == 2:
            os.kill(pid, signal.SIGCONT)
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds()
    rank.meet("the end")


@pytest.mark.parametrize("victim", [LEAF, INNER])
def test_a_rank_that_is_stopped_has_not_gone_though_its_connections_are_lost(victim: int) -> None:
    run(stopped_with_a_reset, 7, victim)


def on_machines(rank: Rank, machines: tuple[int, ...], victim: int, gone_after_s: float) -> float:
    """On machines whose processes cannot see each other."""
    links.GONE_AFTER_S = gone_after_s
    rank.channel.links.place.machine = bytes([machines[rank.number]]) * 8
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RoundFailed, match=f"rank {victim} has gone"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    rank.meet("all know", rank.size - 1)
    return time.monotonic() - began


@pytest.mark.parametrize("victim", [LEAF, INNER, ROOT])
def test_a_rank_that_nobody_can_see_and_that_does_not_come_back_has_gone(victim: int) -> None:
    ended = run(on_machines, 7, tuple(range(7)), victim, 2.0, dies=(victim,))
    took = [rank.value for rank in ended if rank.value is not None]
    assert min(took) > 1.5 and max(took) < 2 + SOON_S


@pytest.mark.parametrize("victim", [INNER, ROOT])
def test_who_sees_that_a_process_has_ended_tells_the_other_machines(victim: int) -> None:
    machines = (0, 1, 0, 1, 1, 2, 2)  # rank 0 on that of rank 2; rank 1 on that of ranks 3 and 4
    ended = run(on_machines, 7, machines, victim, 600.0, dies=(victim,))
    assert max(rank.value for rank in ended if rank.value is not None) < 2 * SOON_S


# The door


def port_taken(rank: Rank) -> None:
    rank.hold_rounds()
    rank.meet("in step")
    address, port, token = door_of(rank, INNER)
    stranger = None
    if rank.number == 6:
        stranger = socket.create_server((address, port), backlog=8)
    rank.meet("the port is taken")
    if rank.number == INNER:
        reset_some(rank.channel, [3, 4])
    rank.hold_rounds(20)
    assert door_of(rank, INNER)[2] != token
    rank.meet("the end")
    if stranger is not None:
        stranger.close()


def test_a_port_that_another_process_has_taken_is_another_one_with_another_token() -> None:
    run(port_taken, 7)


FLOOD = 600


def flood_of_a_port_that_is_open_again(rank: Rank) -> float:
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == 3:
        pid = os.getpid()
        rank.store.set("pid", str(pid))
        with rank.channel.lock:
            reset_some(rank.channel)
            os.kill(pid, signal.SIGSTOP)
    if rank.number == INNER:
        wait_until(listeners)
        rank.store.set("open", "1")
    if rank.number == 6:
        rank.store.wait(["open"], LONG)
        address, port, _ = door_of(rank, INNER)
        visitors = []
        for number in range(FLOOD):
            visitor = socket.create_connection((address, port), 30)
            with contextlib.suppress(OSError):  # dropped already
                visitor.sendall((b"", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(40))[number % 3])
            visitors.append(visitor)
        os.kill(int(rank.store.get("pid")), signal.SIGCONT)
    rank.meet("flooded")
    began = time.monotonic()
    rank.hold_rounds(20)
    took = time.monotonic() - began
    wait_until(lambda: not listeners())
    rank.meet("the end")
    return took


def test_600_strangers_at_a_port_that_is_open_again_keep_no_rank_from_its_rounds() -> None:
    assert max(rank.value for rank in run(flood_of_a_port_that_is_open_again, 7)) < 5 + SOON_S


# The network


def cut_for_long(rank: Rank) -> None:
    import torch.distributed as dist

    tree.CUT_OFF_S, tree.KEEPALIVE_S = 2, 1
    links.GONE_AFTER_S = 1.0  # which is for ranks whose host answers
    host = rank.number % 2
    move_to(HOSTS[host])
    if rank.number == 0:
        server = dist.TCPStore(ADDRESSES[0], 0, is_master=True, wait_for_workers=False)
        rank.store.set("port", str(server.port))
    port = int(rank.store.get("port"))
    store = dist.TCPStore(ADDRESSES[0], port, is_master=False, wait_for_workers=False)
    rank.channel = rank.channel_on(store)  # type: ignore[misc]
    rank.channel.links.place.machine = bytes([host]) * 8
    rank.hold_rounds()
    rank.meet("connected")
    if rank.number == 1:
        ip("-n", HOSTS[1], "link", "set", CABLES[1], "down")
    rank.meet("cut")
    if rank.number < 2:  # each host's first: the others are connected to it
        wait_until(lambda: rank.channel.links.away)
        wait_until(lambda: rank.said)
        assert f"connection to rank {1 - rank.number} is lost: calls wait in vain" in rank.said[0], rank.said
    rank.rounds.issue(rank.number)
    assert rank.rounds.wait(SHORT) is None
    rank.meet("the others gave up")
    if rank.number == 1:
        ip("-n", HOSTS[1], "link", "set", CABLES[1], "up")
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds()
    wait_until(lambda: is_whole(rank))
    rank.meet("the end")


def test_a_network_that_is_cut_until_the_kernel_gives_up_comes_back() -> None:
    with two_hosts():
        run(cut_for_long, 6, fan_out=4)


# The end of an interpreter


def exit_with_a_neighbour_away(rank: Rank) -> Any:
    rank.hold_rounds()
    rank.store.set(f"pid {rank.number}", str(os.getpid()))
    rank.meet("in step")
    pids = [int(rank.store.get(f"pid {number}")) for number in range(rank.size)]
    if rank.number == INNER:
        with rank.channel.lock:
            reset_some(rank.channel)
            os.kill(os.getpid(), signal.SIGSTOP)
    if rank.number in NEIGHBOURS:
        wait_until(lambda: rank.channel.links.away)
        return Exit(7)
    if rank.number == 2:
        wait_until(lambda: not any(Path(f"/proc/{pids[number]}").exists() for number in NEIGHBOURS))
        os.kill(pids[INNER], signal.SIGKILL)
    return None


NEIGHBOURS = (ROOT, 3, 4)


def test_an_interpreter_ends_soon_while_a_neighbour_is_away() -> None:
    ended = run(exit_with_a_neighbour_away, 7, dies=(INNER,))
    for rank in (ended[number] for number in NEIGHBOURS):
        assert rank.exit_code == 7
        assert rank.stderr == ""
        assert rank.at - rank.value.at < 5 + SOON_S
