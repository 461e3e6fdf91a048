"""The exchange between real processes: rounds, questions, connections that fail, meeting and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import select
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from exchange_job import LIMIT_S, Job, Rank, heard, silences

from nemo_patches.channel import exchange, link, meeting
from nemo_patches.channel.answers import (
    ENDED,
    HELD_UP,
    LEFT,
    NO_ANSWER,
    NOT_COME,
    NOT_HEARD,
)
from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.rounds import RoundFailed

pytestmark = pytest.mark.one_nemo
SOON_S = 10.0  # what a busy machine may take for what takes a tenth of a second here


# Rounds.


def test_a_late_rank_s_value_completes_the_round_that_the_others_gave_up() -> None:
    with Job(7) as job:
        others = job.others(4)
        assert set(job.do(others, Rank.one_round, 5, 0.2)) == {None}
        assert job.do([4], Rank.one_round, 9) == [9]
        assert set(job.do(others, Rank.outstanding)) == {9}
        job.do(job.all, Rank.hold_rounds, 50)


def many_names(rank: Rank) -> list[str]:
    names = [f"name {number}" for number in range(300)]
    random.Random(rank.number).shuffle(names)
    rounds = {name: rank.exchange.rounds(name) for name in names}
    wrong = []
    for _ in range(3):
        for name in names:
            rounds[name].issue(int(name[5:]) * 100 + rank.number)
        for name in sorted(names):
            result = rounds[name].wait(timedelta(seconds=LIMIT_S))
            if result != int(name[5:]) * 100 + rank.size - 1:
                wrong.append(name)
    return wrong


def test_rounds_of_300_names_on_each_rank_in_another_order() -> None:
    with Job(5) as job:
        assert job.do(job.all, many_names) == [[]] * 5


class Raised(Exception):
    """By a signal's handler."""


def rounds_with_timers(rank: Rank) -> None:
    """On rank 1 a timer fires within most of them."""
    while (number := rank.key.latest.number) < 1500:
        if rank.number == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.00001 * (number % 40 + 1))
        rank.key.issue((number + 1) * 10 + rank.number)
        result = rank.key.wait(timedelta(seconds=LIMIT_S))
        assert result == rank.key.latest.number * 10 + rank.size - 1
    signal.setitimer(signal.ITIMER_REAL, 0)


def rounds_with_handlers_that_raise(rank: Rank) -> int:
    """How often one has raised within `issue` or `wait`."""

    def handler(*_: object) -> None:
        raise Raised

    signal.signal(signal.SIGALRM, handler)
    count = 0
    while True:
        try:
            try:
                # A function: from 3.12 on, `try` does not see what is raised as its loop goes back.
                rounds_with_timers(rank)
                return count
            except Raised:
                # Where it was raised as the next timer was set, that one is to come.
                signal.setitimer(signal.ITIMER_REAL, 0)
                count += 1
        except Raised:  # it has
            count += 1


def handler_within_a_wait(rank: Rank) -> bool:
    """Whether it runs during the wait, not after it."""
    ran = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: ran.set())
    rank.key.issue(1)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    end = time.monotonic() + LIMIT_S
    while not ran.is_set() and time.monotonic() < end:
        rank.key.wait(timedelta(seconds=0.2))
    return ran.is_set()


def test_signal_handlers_may_raise_anywhere() -> None:
    with Job(3) as job:
        assert job.do(job.all, rounds_with_handlers_that_raise)[1] > 20
        assert job.do([0], handler_within_a_wait) == [True]


# Questions.

# Of hosts with four ranks each.
SILENT_RANKS = {
    "none": (8, []),
    "leaf": (8, [7]),
    "inner rank": (32, [4]),
    "root": (32, [0]),
    "a host": (32, list(range(8, 12))),
    "the root's host": (32, list(range(4))),
    "four": (32, [1, 5, 12, 20]),
    "inner rank and root": (32, [0, 4]),
}


@pytest.mark.parametrize(("size", "stopped"), SILENT_RANKS.values(), ids=SILENT_RANKS)
def test_a_stopped_rank_hides_nobody(size: int, stopped: list[int]) -> None:
    with Job(size, per_host=4, by_file=True) as job:
        job.do(job.all, Rank.hold_rounds, 3)
        job.signal(stopped, signal.SIGSTOP)
        wait_for(lambda: all(is_stopped(job.processes[rank]) for rank in stopped))
        living = job.others(*stopped)
        expected = dict.fromkeys(stopped, NO_ANSWER)

        def all_are_right() -> bool:
            """Of a question of one, and then of all: these wait for a moment, and meanwhile suspect.
            A busy machine keeps a rank from answering within 0.8 s.
            """
            answers = [*job.do(living[-1:], Rank.ask), *job.do(living, Rank.ask)]
            assert all(took_s < SOON_S for took_s, _ in answers)
            return all(
                heard(one) == set(living) and silences(one) == expected
                for _, one in answers
            )

        wait_for(all_are_right)
        job.signal(stopped, signal.SIGCONT)
        job.do(job.all, Rank.hold_rounds, 10)
        wait_for(lambda: all(job.do(stopped, Rank.times_told)))


def is_stopped(process: int) -> bool:
    return (
        Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_for_verdicts(
    job: Job, ranks: Iterable[int], is_right: Callable[[Any], object]
) -> None:
    """Until what each of these ranks is told is right: a busy machine keeps a rank from answering
    within 0.8 s, and a question may have begun before what the test has done.
    """
    ranks = list(ranks)
    wait_for(lambda: all(is_right(told) for _, told in job.do(ranks, Rank.ask)))


def count_sent(rank: Rank) -> None:
    rank.watch.sent = []  # type: ignore[attr-defined]
    flush = link.Link.flush

    def counted(self: link.Link) -> None:
        if self.waits:
            rank.watch.sent.append(1)  # type: ignore[attr-defined]
        flush(self)

    link.Link.flush = counted  # type: ignore[method-assign]


def sent(rank: Rank) -> int:
    return len(rank.watch.sent)  # type: ignore[attr-defined]


def runs_at_rest(rank: Rank) -> int:
    """How often the exchange's thread has run in a second."""
    thread = rank.exchange._thread
    assert thread is not None
    file = f"/proc/self/task/{thread.native_id}/status"

    def switches() -> int:
        with open(file) as status:
            return sum(
                int(line.split()[1]) for line in status if "ctxt_switches" in line
            )

    before = switches()
    time.sleep(1.0)  # what is looked at is that nothing happens meanwhile
    return switches() - before


def test_nothing_is_sent_while_nobody_asks() -> None:
    with Job(16, per_host=8, by_file=True) as job:
        job.do(job.all, Rank.hold_rounds, 1)
        # The ranks' first connections have closed.
        wait_for(lambda: not any(job.do([0], runs_at_rest)))
        job.do(job.all, count_sent)
        job.do([1], runs_at_rest)
        assert not any(job.do(job.all, sent))
        job.do(job.all, Rank.ask)
        assert any(job.do(job.all, sent))


def has_key(rank: Rank, key: str) -> None:
    rank.watch.key = key.format(rank.number)


def has_a_large_state(rank: Rank) -> None:
    rank.watch.asked = lambda id_, reply: reply("large", "x" * 50_000, -1.0)  # type: ignore[method-assign]


def test_every_rank_has_another_state_and_one_is_too_long() -> None:
    with Job(64, per_host=8, by_file=True) as job:
        job.do(job.all, has_key, "place {}")
        wait_for_verdicts(job, job.all, lambda verdict: len(heard(verdict)) == 64)
        job.do([5], has_a_large_state)
        wait_for_verdicts(job, [1], lambda verdict: len(heard(verdict)) == 64)


def answers_nothing(rank: Rank) -> None:
    rank.watch.answers = False


def judges_with_an_error(rank: Rank) -> None:
    rank.watch.judges = False


def holds_pythons_lock(rank: Rank, until: str) -> None:
    """until: a pipe; until something comes there."""
    import ctypes

    pipe = os.open(until, os.O_RDWR)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


def sends_no_answers_of_this_format(rank: Rank) -> None:
    tell = link.Link.tell

    def malformed(self: link.Link, kind: int, content: dict[str, Any]) -> None:
        if kind != link.ANSWER:
            tell(self, kind, content)
            return
        id_ = content["id"]
        run = {"id": id_, "groups": [["k", [[0, 99999999999]], 0, {}]], "silent": []}
        how = {"id": id_, "groups": [], "silent": [["by magic", [[1, 1]]]]}
        for body in (
            b"[" * 100_000,
            b'{"id": 3}',
            b'{"id": "x", "groups": 7}',
            b"\xff",
        ):
            self.send(kind, body=body)
        for one in (run, how):
            self.send(kind, body=json.dumps(one).encode())

    link.Link.tell = malformed  # type: ignore[method-assign]


def test_a_watch_that_fails_ends_no_rounds() -> None:
    with Job(8, per_host=8, by_file=True) as job:
        job.do([3], answers_nothing)
        wait_for_verdicts(job, job.all, lambda told: silences(told) == {3: HELD_UP})
        job.do([0], judges_with_an_error)
        wait_for_verdicts(job, job.all, lambda told: "not judged" in told)
        job.do(job.all, Rank.hold_rounds, 10)


def test_a_rank_that_holds_pythons_lock_and_one_that_sends_nonsense(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Job(8, per_host=8, by_file=True) as job:
        job.send([2], holds_pythons_lock, str(pipe))
        others = job.others(2)
        wait_for_verdicts(job, others, lambda told: silences(told) == {2: NO_ANSWER})
        pipe.write_bytes(b".")
        job.get([2])
        wait_for_verdicts(job, job.all, lambda told: len(heard(told)) == 8)
        job.do([3], sends_no_answers_of_this_format)
        others = job.others(3)
        wait_for_verdicts(job, others, lambda told: heard(told) == set(others))
        job.do(job.all, Rank.hold_rounds, 10)


# Connections.


def begin_resets(rank: Rank, period_s: float) -> None:
    """Break half of this rank's connections again and again."""
    rank.stopping = []
    chance = random.Random(rank.number)

    def reset() -> None:
        while not rank.stopping:
            time.sleep(chance.uniform(0, 2 * period_s))
            for one in list(rank.exchange._all_links):
                if one.is_ready and chance.random() < 0.5:
                    with contextlib.suppress(OSError):
                        now = struct.pack("ii", 1, 0)
                        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                        one.socket.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=reset, daemon=True).start()


def stop(rank: Rank) -> None:
    rank.stopping.append(True)


@pytest.mark.parametrize(("size", "period_s"), [(7, 0.005), (7, 0.05), (32, 0.5)])
def test_rounds_go_on_while_connections_are_reset(size: int, period_s: float) -> None:
    with Job(size, per_host=8, by_file=True) as job:
        job.do(job.all, begin_resets, period_s)
        job.do(job.all, Rank.hold_rounds, 100)
        for _ in range(3):
            assert all(heard(verdict) for _, verdict in job.do(job.all, Rank.ask))
        job.do(job.all, stop)
        assert set(job.do(job.all, Rank.why_over)) == {""}
        wait_for(lambda: len(heard(job.do([1], Rank.ask)[0][1])) == size)


ENDS = [(8, "killed"), (0, "killed"), (8, "closed"), (0, "closed")]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("rank", "how"), ENDS)
def test_the_end_of_a_rank_is_told_to_all_at_once(
    rank: int, how: str, resets: bool
) -> None:
    with Job(16, per_host=8, by_file=True) as job:
        if resets:
            job.do(job.all, begin_resets, 0.02)
        job.do(job.all, Rank.hold_rounds, 3)
        others = job.others(rank)
        job.send(others, Rank.one_round, 1)
        if how == "killed":
            job.signal([rank], signal.SIGKILL)
        else:
            job.do([rank], Rank.close)
        words = [f"rank {rank} has ended"]
        if how == "closed":
            # Its last word may be lost with its connection; then its closed port tells.
            words = [f"rank {rank} has left", *(words if resets else [])]
        assert all(str(why).startswith(tuple(words)) for why in job.get(others))
        if not resets:
            expected = {rank: ENDED if how == "killed" else LEFT}
            wait_for_verdicts(job, others, lambda told: silences(told) == expected)


def few_files(rank: Rank) -> None:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, used + 6))


def flood(rank: Rank) -> int:
    """600 strangers at every rank's port, for three seconds at least; some of them speak."""
    ports = [member.port for member in rank.exchange.members if member is not None]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    strangers: list[socket.socket] = []
    sentences = [b"GET / HTTP/1.0\r\n\r\n", b"nemo-p/1", b"\0" * 44]
    end = time.monotonic() + 3
    while time.monotonic() < end or len(strangers) <= 1000:
        for port in ports:
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            strangers.append(stranger)
        for stranger in strangers[-50:]:
            with contextlib.suppress(OSError):
                stranger.send(random.choice(sentences))
        while len(strangers) > 600 * len(ports):
            strangers.pop(0).close()
        select.select([], [], [], 0.001)
    return len(strangers)


def test_a_flood_of_strangers_where_files_are_few() -> None:
    with Job(10, per_host=4, by_file=True) as job:
        job.do(job.others(9), few_files)
        job.send([9], flood)
        assert set(job.do(job.others(9), Rank.one_round, 1, 1.0)) == {None}
        assert job.get([9])[0] > 1000
        assert job.do([9], Rank.one_round, 1) == [1]
        assert set(job.do(job.others(9), Rank.outstanding)) == {1}
        job.do(job.all, Rank.hold_rounds, 20)
        wait_for(lambda: len(heard(job.do([2], Rank.ask)[0][1])) == 10)


# The list of all ranks.


def deep(rank: int) -> None:
    meeting.FAN_OUT = 2


def count_lists(rank: Rank) -> None:
    rank.lists = []  # type: ignore[attr-defined]
    send = link.Link.send

    def counted(self: link.Link, kind: int, *rest: Any, **more: Any) -> None:
        if kind == link.RANKS:
            rank.lists.append(self.rank)  # type: ignore[attr-defined]
        send(self, kind, *rest, **more)

    link.Link.send = counted  # type: ignore[method-assign]


def lists_sent(rank: Rank) -> list[int]:
    return sorted(rank.lists)  # type: ignore[attr-defined]


def test_the_list_of_all_ranks_goes_down_the_tree_once() -> None:
    with Job(10, joins=False, setup=deep) as job:
        job.do(job.all, count_lists)
        job.do(job.all, Rank.join)
        job.do(job.all, Rank.hold_rounds, 5)
        time.sleep(
            8
        )  # what is looked at is that rank 0 sends it to nobody else afterwards
        to = job.do(job.all, lists_sent)
    assert to[0] == [1, 2]
    assert sorted(rank for ranks in to for rank in ranks) == [*range(1, 10)]


def test_a_list_of_4096_ranks_is_short() -> None:
    chance = random.Random(56)
    members = [
        meeting.Member(
            f"node-{rank // 8:04}",
            f"10.0.{rank // 8 // 256}.{rank // 8 % 256}",
            chance.randrange(32768, 61000),
            chance.randrange(1 << 22),
        )
        for rank in range(4096)
    ]
    body = meeting.packed(members)
    assert len(body) < 10 * 4096
    told = link.Message(link.RANKS, 0, 0, 0, body).content()
    rows = zip(*told["members"], strict=True)
    assert [meeting.Member.from_json(one) for one in rows] == members
    with pytest.raises(ValueError, match="not compressed"):
        link.Message(link.RANKS, 0, 0, 0, b"{}").content()


@pytest.mark.parametrize("silent", [[1], [3], [1, 3]])
def test_a_rank_that_is_stopped_while_all_join_keeps_nobody_from_joining(
    silent: list[int],
) -> None:
    """Nor hides it the ranks below it."""
    with Job(10, joins=False, setup=deep) as job:
        job.do(job.others(9), Rank.join)
        wait_for(lambda: len(heard(job.do([0], Rank.ask)[0][1])) == 9)
        job.signal(silent, signal.SIGSTOP)
        wait_for(lambda: all(is_stopped(job.processes[rank]) for rank in silent))
        job.do([9], Rank.join)
        living = job.others(*silent)
        wait_for_verdicts(job, [0], lambda told: heard(told) == set(living))
        assert job.do(living, ended_ranks) == [[]] * len(living)
        job.do(living, Rank.wait_joined)
        job.signal(silent, signal.SIGCONT)
        job.do(job.all, Rank.hold_rounds, 5)


def test_a_rank_that_is_killed_while_all_join_keeps_nobody_from_joining() -> None:
    with Job(10, joins=False, setup=deep) as job:
        job.do(job.others(9), Rank.join)
        wait_for(lambda: len(heard(job.do([0], Rank.ask)[0][1])) == 9)
        job.signal([1], signal.SIGKILL)
        os.waitpid(job.processes[1], 0)
        job.processes[1] = 0
        job.do([9], Rank.join)
        job.do(job.others(1), Rank.wait_joined)
        wait_for(lambda: job.do(job.others(1), ended_ranks) == [[1]] * 9)


def is_refused_by(rank: Rank) -> None:
    """From outside, as by a firewall: its port is another one than it says."""
    listen = Exchange._listen

    def there(self: Exchange) -> None:
        listen(self)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        self._here = dataclasses.replace(self._here, port=port)

    Exchange._listen = there  # type: ignore[method-assign]


def ended_ranks(rank: Rank) -> list[int]:
    return sorted(rank.exchange.ended)


def test_a_rank_that_its_parent_cannot_reach_joins_and_is_not_called_dead() -> None:
    with Job(6, joins=False, setup=deep) as job:
        job.do([4], is_refused_by)
        job.do(job.all, Rank.join)
        job.do([1], Rank.wait_joined)
        for _, told in job.do([0, 1], Rank.ask):
            assert silences(told).get(4) in (None, NOT_HEARD), told
        job.do(job.all, Rank.wait_joined)
        job.do(job.all, Rank.hold_rounds, 5)
        assert job.do(job.all, ended_ranks) == [[]] * 6
        wait_for_verdicts(job, [0], lambda told: len(heard(told)) == 6)


def few_links(rank: Rank, free: int) -> None:
    """So many files, and no more ever."""
    exchange._FEWEST_LINKS = 3
    limit = len(os.listdir("/proc/self/fd")) + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def test_where_rank_0_has_few_files_the_ranks_join_in_groups() -> None:
    with Job(24, joins=False, setup=deep) as job:
        job.do([0], few_links, 20)
        job.do(job.all, Rank.join)
        job.do(job.all, Rank.wait_joined)
        job.do(job.all, Rank.hold_rounds, 5)
        wait_for_verdicts(job, [5], lambda told: len(heard(told)) == 24)
        assert job.do(job.all, ended_ranks) == [[]] * 24
        (line, *others) = job.do([0], what_was_said)[0]
    assert set(others) <= {"no file is left to accept a connection with"}
    assert re.fullmatch(
        r"the limit on open files \(ulimit -Hn\) leaves \d+ for 24 ranks: they join in"
        " groups, which takes longer",
        line,
    )


@pytest.mark.parametrize(("size", "most"), [(2, 9), (4096, 3)])
def test_many_ranks_ask_the_store_for_rank_0_less_often(size: int, most: int) -> None:
    asked = []

    class Counted(dist.HashStore):  # type: ignore[misc]
        def check(self, keys: list[str]) -> bool:
            asked.append(time.monotonic())
            return False

    store = Counted()
    one = Exchange(lambda: store, 1, size, print)
    one.start()
    wait_for(lambda: asked and time.monotonic() - asked[0] > 1.0)
    one.close()
    assert 1 <= len([at for at in asked if at - asked[0] < 1.0]) <= most


# Meeting.


def test_a_rank_that_has_not_come_is_named_and_comes() -> None:
    with Job(4, joins=False) as job:
        job.do([0, 1, 2], Rank.join)
        wait_for_verdicts(job, [1], lambda told: silences(told) == {3: NOT_COME})
        assert set(job.do([0, 1, 2], Rank.one_round, 1, 0.2)) == {None}
        job.do([3], Rank.join)
        assert job.do([3], Rank.one_round, 2) == [2]
        assert set(job.do([0, 1, 2], Rank.outstanding)) == {2}


def test_a_rank_that_leaves_before_all_have_come_has_left() -> None:
    """And no rank waits at its own end for a connection to it."""
    with Job(3, joins=False) as job:
        job.do([0, 1], Rank.join)
        wait_for(lambda: set(silences(job.do([0], Rank.ask)[0][1])) == {2})
        job.do([1], Rank.close)
        wait_for(lambda: job.do([0], ranks_that_have_left)[0] == [1])
        job.do([2], Rank.join)
        job.do([0, 2], Rank.wait_joined)
        wait_for(lambda: job.do([0, 2], ranks_that_have_left) == [[1], [1]])
        assert job.do([0, 2], is_whole) == [True, True]


def ranks_that_have_left(rank: Rank) -> list[int]:
    return [one for one, silence in rank.exchange.ended.items() if silence.how == LEFT]


def is_whole(rank: Rank) -> bool:
    return rank.exchange.is_whole


def test_a_rank_that_leaves_because_rank_0_was_killed_has_left() -> None:
    """It has no living neighbour in the tree; the others have asked it where it is."""
    with Job(3, per_host=1, by_file=True) as job:
        job.do(job.all, Rank.hold_rounds, 1)
        job.signal([0], signal.SIGKILL)
        wait_for(lambda: all(job.do([1, 2], Rank.why_over)))
        wait_for_verdicts(job, [2], lambda told: heard(told) == {1, 2})
        job.do([2], Rank.close)
        wait_for(lambda: job.do([1], ranks_that_have_left) == [[2]])


def test_without_rank_0_the_others_know_that_it_is_the_one() -> None:
    with Job(3, joins=False) as job:
        job.do([1, 2], Rank.join)
        assert all(
            silences(verdict)[0] == NOT_COME for _, verdict in job.do([1, 2], Rank.ask)
        )


def test_process_groups_in_a_row_on_one_key() -> None:
    with Job(5) as job:
        job.do(job.all, Rank.hold_rounds, 5)
        job.do([1, 3], Rank.rejoin)  # before rank 0, whose old key is still there
        job.do([0, 2, 4], Rank.rejoin)
        job.do(job.all, Rank.wait_joined)
        job.do(job.all, Rank.hold_rounds, 5)


def many_groups(rank: Rank) -> None:
    for _ in range(20):
        rank.rejoin()
        rank.wait_joined()
        rank.hold_rounds(2)


def resources(rank: Rank) -> tuple[int, int]:
    """Open files, and threads, once those that end have ended."""
    import gc

    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_20_process_groups_leave_nothing() -> None:
    with Job(3) as job:
        job.do(job.all, Rank.hold_rounds, 2)
        before = job.do(job.all, resources)
        job.do(job.all, many_groups)
        wait_for(
            lambda: all(
                a <= b for a, b in zip(job.do(job.all, resources), before, strict=True)
            )
        )


def leave_a_stale_key(rank: Rank, port: int) -> None:
    rank.store = rank.make_store()
    text = json.dumps(
        [meeting._FORMAT, "00" * 16, ["elsewhere", "127.0.0.1", port, 1, ""]]
    )
    dist.PrefixStore("group", rank.store).set(meeting.ROOT_KEY, text)


def test_a_stale_key_leads_nobody_astray() -> None:
    with Job(4, joins=False) as job, socket.create_server(("127.0.0.1", 0)) as stranger:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = closed.getsockname()[1]
        for port in (stranger.getsockname()[1], dead):
            job.do([0], leave_a_stale_key, port)
            job.do([1, 2, 3], Rank.join)
            job.do([0], Rank.join)
            job.do(job.all, Rank.wait_joined)
            job.do(job.all, Rank.hold_rounds, 5)
            job.do(job.all, Rank.close)


def test_a_round_completes_after_a_rank_had_held_pythons_lock_through_questions(
    tmp_path: Path,
) -> None:
    """The others have opened connections to it meanwhile, and given them up: what it sends over
    those is lost.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for holder in (0, 2):
        with Job(3) as job:
            job.do(job.all, Rank.hold_rounds, 3)
            others = job.others(holder)
            job.send([holder], holds_pythons_lock, str(pipe))
            assert set(job.do(others, Rank.one_round, 5, 0.1)) == {None}
            for _ in range(2):
                job.do(others, Rank.ask)
            pipe.write_bytes(b".")
            job.get([holder])
            assert job.do([holder], Rank.one_round, 9) == [9]
            assert set(job.do(others, Rank.outstanding)) == {9}


def break_connections(rank: Rank) -> None:
    for one in list(rank.exchange._all_links):
        with contextlib.suppress(OSError):
            one.socket.shutdown(socket.SHUT_RDWR)


def test_the_store_is_not_needed_once_all_have_come() -> None:
    with Job(4) as job:
        job.end_store()
        job.do(job.all, Rank.hold_rounds, 5)
        job.do([1], break_connections)
        job.do(job.all, Rank.hold_rounds, 5)
        wait_for_verdicts(job, [2], lambda told: len(heard(told)) == 4)


def has_no_interface(rank: int) -> None:
    if rank == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"


def test_an_interface_that_is_not_there_is_named_on_all_ranks() -> None:
    with Job(3, setup=has_no_interface) as job:
        expected = (
            "rank 2 cannot take part: GLOO_SOCKET_IFNAME='nowhere0' has no address here"
        )
        assert job.do(job.all, Rank.one_round, 1) == [expected] * 3


def speaks_ipv6(rank: int) -> None:
    meeting.own_addresses = lambda store: ("::1", "::1")  # type: ignore[assignment]


def test_ipv6() -> None:
    with Job(3, setup=speaks_ipv6) as job:
        job.do(job.all, Rank.hold_rounds, 5)


def test_the_tree_has_one_connection_to_each_other_host() -> None:
    chance = random.Random(1)
    for _ in range(300):
        size = chance.randint(1, 300)
        hosts = max(size // chance.choice([1, 2, 8, 16]), 1)
        names = [str(chance.randint(0, hosts)) for _ in range(size)]
        parents = meeting.parents_of(names)
        assert parents.count(-1) == 1
        assert parents[0] == -1
        firsts = sorted({names.index(name) for name in names} - {0})
        pairs = list(enumerate(parents))[1:]
        assert firsts == [
            rank for rank, parent in pairs if names[rank] != names[parent]
        ]
        assert all(parent < rank for rank, parent in pairs)  # so there is no circle
        assert max(parents.count(rank) for rank in range(size)) <= meeting.FAN_OUT
        assert sorted(meeting.succession_of(names)) == list(range(size))


@pytest.mark.parametrize(
    ("gloo", "nccl", "address"),
    [
        ("", "=ib0", "ib0's"),
        ("", "none0,eth0", "eth0's"),
        ("eth0", "^eth0", "eth0's"),
        (
            "",
            "^none0,eth0,ib0",
            "127.0.0.1",
        ),  # any but these: the one on the way to the store
    ],
)
def test_an_interface_that_nccl_is_to_leave_alone_is_not_taken(
    gloo: str, nccl: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    of_interface = {"eth0": "eth0's", "ib0": "ib0's"}
    monkeypatch.setattr(meeting, "_address_of", lambda name: of_interface.get(name, ""))
    assert meeting.own_addresses(dist.HashStore())[0] == address


# Files.


def low_soft_limit(rank: Rank) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard)
    )


def test_the_soft_limit_on_files_is_raised() -> None:
    with Job(5, joins=False) as job:
        job.do([0, 1], low_soft_limit)
        job.do(job.all, Rank.join)
        job.do(job.all, Rank.wait_joined)
        job.do(job.all, Rank.hold_rounds, 5)
        assert all(not said for said in job.do(job.all, what_was_said))


def what_was_said(rank: Rank) -> list[str]:
    return rank.said


def no_files(rank: Rank, free: int) -> None:
    """The store is connected; after that there are only so many."""
    rank.store = rank.make_store()
    held = [os.dup(0) for _ in range(40)]  # each the lowest number that was free
    limit = max(held) + 1
    rank.held = held[free:]  # type: ignore[attr-defined]
    for file in held[:free]:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    rank.make_store = lambda: rank.store
    rank.join()


def give_files_back(rank: Rank) -> None:
    for file in rank.held:  # type: ignore[attr-defined]
        os.close(file)


@pytest.mark.parametrize("free", [0, 1, 2])
def test_a_rank_without_files_says_so_once_and_joins_when_there_are_some(
    free: int,
) -> None:
    with Job(3, joins=False) as job:
        job.do([1], no_files, free)
        job.do([0, 2], Rank.join)
        wait_for(lambda: job.do([1], what_was_said)[0])
        assert set(job.do(job.all, Rank.one_round, 1, 0.2)) == {None}
        job.do([1], give_files_back)
        assert set(job.do(job.all, Rank.outstanding)) == {1}
        (line,) = job.do([1], what_was_said)[0]
        assert "Too many open files" in line


def memory_kib(rank: Rank) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_many_rounds_leave_memory_files_and_threads_as_they_were() -> None:
    with Job(3) as job:
        job.do(job.all, Rank.hold_rounds, 2000)
        before = job.do(job.all, resources)
        memory = job.do(job.all, memory_kib)
        job.do(job.all, hold_many_rounds)
        assert job.do(job.all, resources) == before
        for now, then in zip(job.do(job.all, memory_kib), memory, strict=True):
            assert now - then < 256, (then, now)  # 10 bytes a round


def hold_many_rounds(rank: Rank) -> None:
    """Without the list of how long each took."""
    for _ in range(25):
        rank.hold_rounds(1000)


# Ends.


def fork_a_child(rank: Rank) -> None:
    """As a data loader's worker: it outlives the rank."""
    if os.fork() == 0:
        time.sleep(LIMIT_S)
        os._exit(0)


@pytest.mark.parametrize("victim", [0, 1, 4])
def test_a_rank_that_is_killed_has_ended_although_its_child_lives(victim: int) -> None:
    with Job(5) as job:
        job.do(job.all, Rank.hold_rounds, 3)
        job.do([victim], fork_a_child)
        others = job.others(victim)
        job.send(others, Rank.one_round, 1)
        job.signal([victim], signal.SIGKILL)
        expected = f"rank {victim} has ended: its port is closed"
        assert set(job.get(others)) == {expected}


def sockets_in_a_forked_child(rank: Rank) -> tuple[int, int, str]:
    """Of the exchange: how many there are here, how many in the child, and what a round says there."""
    exchange = rank.exchange
    assert exchange._listener is not None
    numbers = [one.socket.fileno() for one in exchange._all_links]
    ours = {
        os.readlink(f"/proc/self/fd/{one}")
        for one in [*numbers, exchange._listener.fileno()]
    }
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                left.add(os.readlink(f"/proc/self/fd/{name}"))
        text = ""
        try:
            rank.key.issue(1)
        except RoundFailed as error:
            text = str(error)
        exchange.ask()
        exchange.close()
        os.write(writer, json.dumps([len(ours & left), text]).encode())
        signal.pause()
    there, text = json.loads(os.read(reader, 1000))
    rank.child = child  # type: ignore[attr-defined]
    return len(ours), there, text


def end_child(rank: Rank) -> None:
    os.kill(rank.child, signal.SIGKILL)  # type: ignore[attr-defined]
    os.waitpid(rank.child, 0)  # type: ignore[attr-defined]


def test_a_forked_child_has_nothing_of_the_exchange() -> None:
    with Job(3) as job:
        here, there, text = job.do([1], sockets_in_a_forked_child)[0]
        assert here >= 2
        assert there == 0
        assert "forked" in text
        job.do(job.all, Rank.hold_rounds, 10)
        job.do([1], end_child)


def opens_connections(rank: Rank, ranks: list[int]) -> None:
    exchange = rank.exchange

    def opens() -> None:
        for _ in range(30):
            for other in ranks:
                exchange.post(lambda other=other: exchange._open(other))
            time.sleep(0.05)

    threading.Thread(target=opens, daemon=True).start()


@contextlib.contextmanager
def a_host_that_takes_no_connection() -> Iterator[int]:
    """A port whose backlog is full: connections to it hang, as to a host without power."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        taken = [socket.socket() for _ in range(4)]
        for one in taken:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        try:
            yield port
        finally:
            for one in taken:
                one.close()


def test_blocked_ports_are_said_once_with_peer_address_and_port() -> None:
    """And the rank that cannot connect knows only of itself; it accuses nobody."""
    with a_host_that_takes_no_connection() as port, Job(2, joins=False) as job:
        job.do([0], leave_a_stale_key, port)
        job.do([1], Rank.join)
        wait_for(lambda: job.do([1], what_was_said)[0])
        _, verdict = job.do([1], Rank.ask)[0]
        assert heard(verdict) == {1}
        assert silences(verdict) == {0: NOT_HEARD}
        time.sleep(1.0)  # it tries again meanwhile
        (line,) = job.do([1], what_was_said)[0]
        assert (
            line
            == f"no connection to rank 0 (elsewhere, 127.0.0.1, port {port}): no answer"
        )


def has_moved(rank: Rank, other: int, port: int) -> None:
    """From now on this rank looks for another one at this port."""
    member = rank.exchange.members[other]
    assert member is not None
    there = meeting.Member(member.host, "127.0.0.1", port, member.pid)
    rank.exchange.members[other] = there


def test_connections_that_hang_slow_no_round() -> None:
    with Job(6, by_file=True) as job, a_host_that_takes_no_connection() as port:
        calm = [
            one for times in job.do(job.all, Rank.hold_rounds, 200) for one in times
        ]
        for other in (3, 4, 5):
            job.do([0, 1, 2], has_moved, other, port)
        job.do([0, 1, 2], opens_connections, [3, 4, 5])
        busy = [
            one
            for times in job.do(job.all, Rank.hold_rounds, 200, 0.005)
            for one in times
        ]
        assert statistics.median(busy) < 20 * statistics.median(calm) + 0.1


def test_what_has_come_and_is_not_read_yet_is_no_gap() -> None:
    """A rank that was held up itself has not read the answers; large packets are not lost."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as there,
    ):
        own, _ = listener.accept()
        ours = link.Link(own, 1, is_ours=False)
        assert not ours.has_unread
        there.sendall(b"an answer")
        wait_for(lambda: ours.has_unread)
        assert not ours.has_gap
        own.close()


def asks_and_is_held_up(rank: Rank) -> Any:
    """Its exchange's thread, for longer than the others may take to answer."""
    before = rank.times_told()
    rank.exchange.ask()
    rank.exchange.post(lambda: time.sleep(2.0))
    wait_for(lambda: rank.times_told() > before)
    return rank.watch.told_at[before][1]


def test_a_judge_that_was_held_up_itself_calls_no_other_silent() -> None:
    """What has come meanwhile is read first."""
    with Job(4, by_file=True) as job:
        (verdict,) = job.do([0], asks_and_is_held_up)
        assert heard(verdict) == {0, 1, 2, 3}
