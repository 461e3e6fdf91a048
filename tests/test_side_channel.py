"""The side channel: real processes, a real store, and what may befall them. Ranks 0 -> 1, 2; 1 -> 3, 4; 2 -> 5, 6."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hosts import ADDRESSES, CABLES, HOSTS, ip, move_to, two_hosts
from hypothesis import given
from hypothesis import strategies as st
from light_ranks import LONG, SOON_S, Exit, Rank, listeners, open_files, resident_kib, run, threads
from ranks import wait_until

from nemo_patches.channel import keys, tree
from nemo_patches.channel.side_channel import RoundFailed
from nemo_patches.channel.tree import Place, here_and_store, parents

SHORT = timedelta(seconds=0.4)
LEAF, INNER, ROOT = 4, 1, 0

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def part_of_store(rank: Rank, attempt: int = 0) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(str(attempt), dist.PrefixStore(keys.PREFIX, rank.store))


def take_place(rank: Rank) -> None:
    """This rank says where it is, and does not connect yet: the others' ports stay open for it."""
    job_store = rank.channel._job_store
    store = job_store.connect().join(anew=True)
    store.wait([keys.ROOT], LONG)  # rank 0 has come
    Place(job_store.server, rank.number, rank.size).find(store, job_store.attempt)


# Rounds


def late_rank(rank: Rank, late: int) -> None:
    if rank.number == late:
        rank.meet("the others gave up")
        rank.rounds.issue(rank.number)
    else:
        rank.rounds.issue(rank.number)
        began = time.monotonic()
        assert rank.rounds.wait(SHORT) is None
        assert time.monotonic() - began < SHORT.total_seconds() + SOON_S
        rank.meet("the others gave up")
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds(50)
    rank.meet("the end")


@pytest.mark.parametrize("late", [LEAF, INNER, ROOT])
def test_a_late_ranks_round_comes_once_it_has_come(late: int) -> None:
    run(late_rank, 7, late)


def skipped_call(rank: Rank) -> None:
    rank.hold_rounds(1)
    calls = [call for call in range(21) if (call, rank.number) != (7, LEAF)][:20]
    for index, call in enumerate(calls):
        rank.rounds.issue(10 * call + rank.number)
        assert rank.rounds.wait(LONG) == 10 * (index + (index >= 7)) + LEAF
    rank.meet("the end")


def test_a_skipped_call_pairs_the_rounds_by_their_number() -> None:
    run(skipped_call, 5)


def many_keys(rank: Rank) -> None:
    all_rounds = [rank.channel.rounds(f"encoder {number}") for number in range(300)]
    for number in random.Random(rank.number).sample(range(300), 300):
        all_rounds[number].issue(10 * number + rank.number)
    assert [rounds.wait(LONG) for rounds in all_rounds] == [10 * number + 4 for number in range(300)]
    rank.meet("the end")


def test_300_keys_in_another_order_on_each_rank_all_outstanding_at_once() -> None:
    run(many_keys, 5)


class Stopped(Exception):
    """What a user's signal handler raises."""


def interrupted_issue(rank: Rank) -> int:
    rank.hold_rounds()
    armed, interrupted, chance = [], 0, random.Random(rank.number)

    def stop(*_: object) -> None:
        if armed:
            armed.clear()
            raise Stopped

    signal.signal(signal.SIGALRM, stop)
    for _ in range(500):
        number = rank.rounds.done + 1
        try:
            armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1e-4))
            rank.rounds.issue(10 * number + rank.number)
            armed.clear()
        except Stopped:
            interrupted += 1
            if rank.rounds.issued < number:  # it had not begun
                rank.rounds.issue(10 * number + rank.number)
        assert rank.rounds.wait(LONG) == 10 * number + 2
    rank.meet("the end")
    return interrupted


def test_a_round_comes_wherever_a_signal_handler_has_raised_while_it_was_issued() -> None:
    assert any(rank.value for rank in run(interrupted_issue, 3))


def missing_rank(rank: Rank, missing: int) -> float:
    waited = 0.0
    if rank.number != missing:
        rank.rounds.issue(rank.number)
        began = time.monotonic()
        assert rank.rounds.wait(SHORT) is None
        waited = time.monotonic() - began
    rank.meet("the end")
    return waited


@pytest.mark.parametrize("missing", [LEAF, INNER, ROOT])
def test_a_rank_that_never_comes_is_waited_for_in_bounded_time(missing: int) -> None:
    for rank in run(missing_rank, 5, missing):
        assert rank.value < SHORT.total_seconds() + SOON_S


# Ranks that die or stop


def killed_rank(rank: Rank, victim: int, child: str) -> float:
    rank.hold_rounds()
    rank.meet("in step")
    if rank.number == victim:
        if child == "fork" and os.fork() == 0:  # as a data loader's worker
            signal.pause()
        elif child == "exec":
            subprocess.Popen(["sleep", "600"], close_fds=False)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RoundFailed, match=f"rank {victim} has gone"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    return time.monotonic() - began


@pytest.mark.parametrize("child", ["", "fork", "exec"])
@pytest.mark.parametrize("victim", [LEAF, INNER, ROOT])
def test_every_rank_is_told_at_once_which_one_was_killed(victim: int, child: str) -> None:
    ended = run(killed_rank, 7, victim, child, dies=(victim,))
    assert ended[victim].exit_code == -signal.SIGKILL
    assert all(rank.value < SOON_S for rank in ended if rank.value is not None)


def stopped_rank(rank: Rank, victim: int) -> None:
    rank.hold_rounds()
    if rank.number == victim:
        rank.store.set("pid", str(os.getpid()))
        rank.meet("in step")
        os.kill(os.getpid(), signal.SIGSTOP)
        rank.rounds.issue(rank.number)
    else:
        rank.meet("in step")
        pid = int(rank.store.get("pid"))
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        rank.rounds.issue(rank.number)
        assert rank.rounds.wait(SHORT) is None
        rank.meet("the others gave up", rank.size - 1)
        if rank.number == 2:
            os.kill(pid, signal.SIGCONT)
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds()
    rank.meet("the end")


@pytest.mark.parametrize("victim", [LEAF, INNER, ROOT])
def test_the_round_comes_once_a_stopped_rank_goes_on(victim: int) -> None:
    run(stopped_rank, 7, victim)


# The end of an interpreter


def ending(rank: Rank, how: str) -> Any:
    if how == "stock":
        return Exit(7)
    if how == "pending":
        rank.hold_rounds()
    if rank.number != LEAF:
        rank.rounds.issue(rank.number)
        assert rank.rounds.wait(SHORT) is None
        rank.meet("pending", rank.size - 1)
        return Exit(7)
    if how == "pending":
        wait_until(lambda: rank.channel.error)
    return None


def test_an_interpreter_with_a_pending_round_ends_as_soon_as_stock() -> None:
    took = {}
    for how in ("stock", "pending", "never connected"):
        ended = [rank for rank in run(ending, 5, how) if isinstance(rank.value, Exit)]
        assert [rank.exit_code for rank in ended] == [7] * len(ended)
        assert [rank.stderr for rank in ended] == [""] * len(ended)
        took[how] = max(rank.at - rank.value.at for rank in ended)
    assert max(took.values()) < 2 * took["stock"] + 5, took


def leaves_unseen(rank: Rank) -> None:
    rank.rounds.issue(rank.number)
    if rank.number == ROOT:
        with rank.channel.lock:  # so it does not let rank 1 in yet
            rank.meet("rank 1 is at the door")
    else:
        wait_until(lambda: rank.channel.links.parent)
        rank.channel.stop("the process group was destroyed", leaves=True)
        rank.channel.join(LONG)
        rank.meet("rank 1 is at the door")
    with pytest.raises(RoundFailed, match="rank 1 has left" if rank.number == ROOT else "was destroyed"):
        rank.rounds.wait(LONG)
    rank.meet("the end")


def test_a_rank_that_leaves_before_its_parent_lets_it_in_has_left_and_is_not_lost() -> None:
    run(leaves_unseen, 2)


# Few files


def low_soft_limit(rank: Rank) -> None:
    if rank.number == INNER:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        low = open_files() + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    rank.hold_rounds()
    if rank.number == INNER:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
    assert rank.said == []
    rank.meet("the end")


def test_the_soft_limit_on_files_is_raised() -> None:
    run(low_soft_limit, 5)


def no_files(rank: Rank, listens: bool, free: int) -> None:
    if rank.number == INNER:
        held = [os.dup(0) for _ in range(40)]  # each the lowest number that was free
        limit = max(held) + 1
        for _ in range(free):
            os.close(held.pop())
        if listens:
            rank.rounds.issue(rank.number)
            wait_until(listeners)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit,) * 2)
        rank.meet("no files")
        if not listens:
            rank.rounds.issue(rank.number)
        wait_until(lambda: rank.said)
    else:
        if listens and rank.number > 2:
            take_place(rank)
        else:
            rank.rounds.issue(rank.number)
        rank.meet("no files")
        if listens and rank.number > 2:
            rank.rounds.issue(rank.number)
        assert rank.rounds.wait(SHORT) is None
    rank.meet("it was said")
    if rank.number == INNER:
        assert rank.rounds.wait(SHORT) is None
        for file in held:
            os.close(file)
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds()
    # A child may find the port of its parent closed meanwhile.
    trouble = "Too many open files" if rank.number == INNER else "Connection refused"
    assert len(rank.said) <= 1 and all(trouble in line for line in rank.said), rank.said
    rank.meet("the end")


@pytest.mark.parametrize(("listens", "free"), [(False, 0), (False, 2), (True, 0)])  # two: for the store alone
def test_a_rank_without_files_says_so_once_and_connects_when_there_are_some(listens: bool, free: int) -> None:
    run(no_files, 5, listens, free)


# Strangers

FLOODED, FREE_FILES = (0, 1, 2), 14  # with a fan-out of 3: 0 -> 1, 2, 3; 1 -> 4, 5, 6; 2 -> 7, 8, 9
STRANGER, LAST = 3, (3, 6, 9)  # the children that come when the flood is there


def flood(rank: Rank) -> float:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    port = {}
    if rank.number in LAST:
        take_place(rank)
    else:
        if rank.number in FLOODED:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + FREE_FILES,) * 2)
        rank.rounds.issue(rank.number)
    if rank.number in FLOODED:
        wait_until(listeners)
        (listener,) = listeners()
        assert listener.address == "0100007F"  # 127.0.0.1
    if rank.number == STRANGER:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        visitors = []
        for flooded in FLOODED:
            door = keys.DOOR.format(rank=flooded)
            address, port[flooded], _ = json.loads(part_of_store(rank).get(door))
            for number in range(600):
                visitor = socket.create_connection((address, port[flooded]), 30)
                with contextlib.suppress(OSError):  # dropped already
                    visitor.sendall((b"", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(24))[number % 3])
                visitors.append(visitor)
    rank.meet("flooded")
    began = time.monotonic()
    if rank.number in LAST:
        rank.rounds.issue(rank.number)
    assert rank.rounds.wait(LONG) == rank.size - 1
    took = time.monotonic() - began
    rank.hold_rounds(20)
    assert rank.number in FLOODED or not part_of_store(rank).check([keys.DOOR.format(rank=rank.number)])
    rank.meet("the rounds went on")
    assert not listeners()
    for one in port.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", one), 30)
    rank.meet("the end")
    return took


def test_600_strangers_at_every_port_keep_no_rank_from_its_rounds() -> None:
    assert max(rank.value for rank in run(flood, 10, fan_out=3)) < 5 + SOON_S


# One store, several process groups


def in_process_of_its_own(rank: Rank, scenario: Any) -> None:
    if (process := os.fork()) == 0:
        os._exit(scenario(Rank(rank.number, rank.size, rank.host, rank.port)))
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def predecessor(rank: Rank, attempt: int) -> int:
    rank.rounds.issue(rank.number)
    seat = keys.SEAT.format(attempt=attempt, rank=rank.number)
    part_of_store(rank, attempt).wait([seat.removeprefix(f"{attempt}/")], LONG)
    return 0  # its end is as sudden as a kill


def successor(rank: Rank, attempt: int) -> int:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(2 * rank.number + 1)
    rank.hold_rounds()
    assert rank.channel._job_store.attempt == attempt
    rank.meet(f"attempt {attempt} is over")
    return 0


def stale_keys(rank: Rank) -> None:
    attempt = 0
    for subset in range(1 << rank.size):
        if subset >> rank.number & 1:
            in_process_of_its_own(rank, lambda own, attempt=attempt: predecessor(own, attempt))
        rank.meet(f"{subset:b} came and died")
        attempt += subset > 0
        in_process_of_its_own(rank, lambda own, attempt=attempt: successor(own, attempt))
        attempt += 1
        rank.meet(f"all came after {subset:b}")


def test_keys_of_earlier_attempts_do_no_harm_whoever_made_them() -> None:
    run(stale_keys, 3)


def new_group(rank: Rank) -> None:
    warnings.simplefilter("always", ResourceWarning)  # as in Python's development mode
    for number in range(3):
        rounds = rank.rounds if number == 0 else rank.channel_on(rank.store).rounds("encoder")
        for value in range(3):
            rounds.issue(10 * value + rank.number)
            assert rounds.wait(LONG) == 10 * value + rank.size - 1
        rounds.issue(1)
        rank.meet(f"group {number} is over")
        rounds.channel.stop("the process group was destroyed")
        with contextlib.suppress(RoundFailed):
            rounds.wait(LONG)
    # One rank fewer, and all again, of whom that rank comes first.
    if rank.number < 4:
        rank.size = 4
        rounds = rank.channel_on(rank.store).rounds("encoder")
        rounds.issue(rank.number)
        assert rounds.wait(LONG) == 3
        rank.meet("four have met")
        rounds.channel.stop("the process group was destroyed")
        rank.size = 5
    rank.meet("all again")
    if rank.number < 4:
        rank.meet("the last rank is here")
    rounds = rank.channel_on(rank.store).rounds("encoder")
    rounds.issue(rank.number)
    if rank.number == 4:
        assert rounds.wait(SHORT) is None
        rank.meet("the last rank is here")
    assert rounds.wait(LONG) == 4
    assert rank.said == []
    rank.meet("the end")


def test_a_new_process_group_on_the_same_store() -> None:
    assert not [rank.stderr for rank in run(new_group, 5) if "ResourceWarning" in rank.stderr]


# Addresses


def no_interface(rank: Rank) -> None:
    if rank.number == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    with pytest.raises(RoundFailed, match=r"rank 2 cannot take part.*none0"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    rank.meet("the end")


def test_a_rank_that_cannot_take_part_ends_every_ranks_rounds_with_its_reason() -> None:
    run(no_interface, 5)


@pytest.mark.parametrize(
    ("gloo", "nccl", "address"),
    [
        ("", "=ib0", "ib0's"),
        ("", "none0,eth0", "eth0's"),
        ("eth0", "^eth0", "eth0's"),
        ("", "^none0,eth0,ib0", "127.0.0.1"),  # any but these: the one on the way to the store
    ],
)
def test_an_interface_that_nccl_is_to_leave_alone_is_not_taken(
    gloo: str, nccl: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.setattr(tree, "_address", {"eth0": "eth0's", "ib0": "ib0's"}.get)
    assert here_and_store(("127.0.0.1", 1))[0] == address


def over_ipv6(rank: Rank) -> None:
    rank.hold_rounds()
    address, _, _ = json.loads(part_of_store(rank).get(keys.DOOR.format(rank=0)))
    assert address == "::1"
    rank.meet("the end")


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    run(over_ipv6, 5, host="::1")


def connections(to: str, but: int) -> int:
    """How many this host has to another one, without those to that port."""
    count = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, own, other, state = line.split()[:4]
        address, port = other.split(":")
        if state == "01" and socket.inet_ntoa(bytes.fromhex(address)[::-1]) == to:
            count += but not in (int(port, 16), int(own.split(":")[1], 16))
    return count


def on_two_hosts(rank: Rank) -> None:
    import torch.distributed as dist

    host = rank.number % 2
    move_to(HOSTS[host])
    if rank.number == 0:
        server = dist.TCPStore(ADDRESSES[0], 0, is_master=True, wait_for_workers=False)
        rank.store.set("port", str(server.port))
    port = int(rank.store.get("port"))
    store = dist.TCPStore(ADDRESSES[0], port, is_master=False, wait_for_workers=False)
    rank.rounds = rank.channel_on(store).rounds("encoder")  # type: ignore[misc]
    rank.hold_rounds()
    assert connections(to=ADDRESSES[1 - host], but=port) == 1
    # The cable is cut, and mended.
    rank.meet("connected")
    if rank.number == 1:
        ip("-n", HOSTS[1], "link", "set", CABLES[1], "down")
    rank.meet("cut")
    rank.rounds.issue(rank.number)
    assert rank.rounds.wait(SHORT) is None
    rank.meet("the others gave up")
    if rank.number == 1:
        ip("-n", HOSTS[1], "link", "set", CABLES[1], "up")
    assert rank.rounds.wait(LONG) == rank.size - 1
    rank.hold_rounds()
    rank.meet("the end")


def test_two_hosts_with_one_connection_between_them() -> None:
    with two_hosts():
        run(on_two_hosts, 8, fan_out=4)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=80), st.integers(2, 20))
def test_parents_make_a_tree_with_one_connection_to_each_other_host(hosts: list[int], fan_out: int) -> None:
    found = parents(hosts, fan_out)
    children = Counter(found)
    assert found[0] == -1 and children[-1] == 1
    assert max(children.values()) <= fan_out
    for rank in range(len(hosts)):
        for _ in range(len(hosts)):
            rank = found[rank] if rank else 0
        assert rank == 0
    between = [rank for rank in range(1, len(hosts)) if hosts[rank] != hosts[found[rank]]]
    assert len(between) == len(set(hosts)) - 1


# Many rounds, many ranks

SOAK_ROUNDS, SETTLED = 100_000, 2_000


def soak(rank: Rank) -> tuple[int, int]:
    rank.hold_rounds(SETTLED)
    before, memory = (open_files(), threads()), resident_kib()
    rank.hold_rounds(SOAK_ROUNDS)
    assert (open_files(), threads()) == before
    rank.meet("the end")
    return memory, resident_kib()


def test_many_rounds_leave_memory_files_and_threads_as_they_were() -> None:
    for rank in run(soak, 3):
        before, after = rank.value
        assert after - before < 512, (before, after)  # KiB: 26 bytes a round
