"""Connections outlive the rounds; and the second tree, upside down, in which the first's inner ranks are leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_ranks import LONG, Rank, listeners, reset_some, run
from ranks import wait_until

from nemo_patches.channel.links import LEFT, VANISHED
from nemo_patches.channel.side_channel import RoundFailed, SideChannel
from nemo_patches.channel.store import JobStore
from nemo_patches.channel.survey import Verdict
from nemo_patches.channel.tree import mirrored, parents

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def connections_after_a_death(rank: Rank, victim: int) -> None:
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RoundFailed, match=f"rank {victim} has gone"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    rank.meet("all know", rank.size - 1)
    links = rank.channel.links
    others = links.place.neighbours - {victim}
    wait_until(lambda: links.connections.keys() == others)
    assert links.ended == ({victim: VANISHED} if victim in links.place.neighbours else {})
    rank.meet("still connected", rank.size - 1)
    reset_some(rank.channel)  # and they come back
    rank.meet("reset", rank.size - 1)
    wait_until(lambda: links.connections.keys() == others and not listeners())
    assert rank.said == []
    rank.meet("the end", rank.size - 1)


@pytest.mark.parametrize("victim", [4, 1, 0])
def test_connections_outlive_the_rounds_and_come_back_after_them(victim: int) -> None:
    run(connections_after_a_death, 7, victim, dies=(victim,))


def leaves_after_a_death(rank: Rank) -> None:
    """Each neighbour of a rank that leaves knows that, though the rounds ended before."""
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RoundFailed, match="rank 6 has gone"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    rank.meet("all know", rank.size - 1)
    if rank.number == 1:
        rank.channel.stop("the process group was destroyed", leaves=True)
        rank.channel.join(LONG)
    elif rank.number in (0, 3, 4):
        wait_until(lambda: rank.channel.links.ended.get(1) == LEFT)
    assert rank.channel.error.startswith("rank 6 has gone")
    rank.meet("the end", rank.size - 1)


def test_a_rank_that_leaves_after_the_rounds_have_ended_has_left() -> None:
    run(leaves_after_a_death, 7, dies=(6,))


class Unasked:
    """A subject that nobody asks about."""

    def asked(self, id_: str, reply: Callable[[Any], None]) -> None:
        raise AssertionError

    def merge(self, answers: list[Any]) -> Any:
        raise AssertionError

    def told(self, verdict: Verdict) -> None:
        raise AssertionError


def two_trees(rank: Rank) -> int:
    channel = SideChannel(JobStore(rank.store, rank.number), rank.number, rank.size, rank.said.append)
    channel.take_surveys(Unasked())
    rank.channel = channel  # type: ignore[misc]
    rank.hold_rounds()
    links, mirror = trees = channel._trees
    wait_until(lambda: all(links.is_whole() for links in trees) and not listeners())
    assert not (links.place.children and mirror.place.children) or rank.size == 2
    rank.meet("whole")
    before = time.monotonic()
    reset_some(channel)
    for connection in list(mirror.connections.values()):
        with contextlib.suppress(OSError):  # lost already: the other end has been faster
            connection.socket.shutdown(socket.SHUT_RDWR)
    rank.hold_rounds(20)
    wait_until(lambda: all(links.is_whole() for links in trees) and not listeners())
    assert time.monotonic() - before < LONG.total_seconds()
    rank.meet("the end")
    return len(links.connections) + len(mirror.connections)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_both_trees_are_whole_and_come_back(size: int) -> None:
    assert max(rank.value for rank in run(two_trees, size, fan_out=4 if size > 8 else 16)) <= 18


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200))
def test_no_rank_is_inner_in_both_trees(hosts: list[int]) -> None:
    first, second = parents(hosts, 16), mirrored(hosts, 16)
    assert second[-1] == -1 and second.count(-1) == 1
    inner = (set(first) - {-1}) & (set(second) - {-1})
    assert not inner or len(hosts) <= 2 or _hosts_are_single(hosts)


def _hosts_are_single(hosts: list[int]) -> bool:
    return any(hosts.count(host) == 1 for host in hosts)
