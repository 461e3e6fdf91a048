"""What is said of a stall, when, how loudly, who runs on_stall, and whom stall_exit ends: examples,
and jobs drawn by chance, in simulated time.

That a real rank is seen to be where these examples say it is, real jobs show: test_job_stalls.py,
test_stall_exit.py, test_requests.py. JOBS=10000 draws so many in place of a few.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from simulated_watch import (
    ASKS,
    BARRIER,
    GATHER,
    GPU,
    GRADIENTS,
    HAS_LEFT,
    KILLED,
    POLLS,
    READS,
    RECEIVES,
    SAVES,
    STEPS,
    STOPPED,
    TRAINS,
    WORKS,
    Doing,
    Job,
    Rank,
    Row,
)

pytestmark = pytest.mark.one_nemo
JOBS = int(os.environ.get("JOBS", "60"))
HANGS_AT = 30
EVERY_60_S = {"stall_timeout": 60, "stall_exit": 120, "on_stall": "page"}
BACKWARD = "backward, which reduces the gradients, in step (train.py:9)"
OTHERS = f"ranks 0, 2: {BACKWARD}"
CALLED = ", after encoder call 60"
IN_A_COLLECTIVE = "some wait in a collective"
LASTS = "whatever it is, it has not ended"
UNEVEN = (
    "if it is uneven training: `NEMO_PATCHES_STOP_TOGETHER=training`; if it is uneven"
    " evaluation: `NEMO_PATCHES_METRICS=deferred`; the ranks wait in different"
    " collectives; which of them is wrong cannot be told"
)
ALL_IN = (
    "every rank waits in the same collective: possibly one is a call ahead, or the"
    " network has failed"
)
MAY_WAIT = "who waits may wait for a rank that goes on"
NOT_KNOWN = "no rank is known to wait for another"
ONE_READS = [GRADIENTS, READS, GRADIENTS]
WAITS_FOR_CHILD = replace(GRADIENTS, waits_for_child=True)
BARRIER_AND_CHILD = replace(BARRIER, waits_for_child=True)
QUEUE = Doing("get (serve.py:2)", request="perhaps queue.get()")
AT_ONCE = "90 WARNING page 150 WARNING ERROR 155 exit"
INFO_TWICE = "90 INFO 150 INFO 270 WARNING page 510 WARNING 630 ERROR 635 exit"
BUSY = "90 INFO 150 INFO 270 WARNING page 510 WARNING 990 WARNING"


@dataclass(frozen=True)
class Hang:
    """Three ranks train, and from second 30 on do this. text: of the verdict. told: the lines of
    one that waits, each with its second; on_stall; its exit. why: of that.
    """

    doing: tuple[Doing, Doing, Doing]
    text: str
    told: str = AT_ONCE
    why: str = IN_A_COLLECTIVE
    at_last: str = ""  # added to the text, from the warning on


HANGS = {
    "one reads": Hang(
        (GRADIENTS, READS, GRADIENTS),
        f"rank 1 (node1, pid 101): read (data.py:41) | {OTHERS}",
    ),
    "one polls, or retries for ever": Hang(
        (GRADIENTS, POLLS, GRADIENTS),
        f"rank 1 (node1, pid 101): wait_for_file (data.py:7) | {OTHERS}",
    ),
    "one saves a checkpoint": Hang(
        (BARRIER, SAVES, BARRIER),
        "rank 1 (node1, pid 101) writes a checkpoint: write (ckpt.py:3) | ranks 0, 2:"
        " barrier, in save (train.py:31)",
        INFO_TWICE,
        f"{IN_A_COLLECTIVE}, and {LASTS}",
        " | no rank has moved for ",
    ),
    "one saves a checkpoint, and another reads": Hang(
        (BARRIER, SAVES, READS),
        "rank 1 (node1, pid 101) writes a checkpoint: write (ckpt.py:3) | rank 2"
        " (node2, pid 102): read (data.py:41) | rank 0 (node0, pid 100): barrier, in"
        " save (train.py:31)",
        "90 WARNING page 150 WARNING 270 WARNING 510 WARNING 630 ERROR 635 exit",
        f"{IN_A_COLLECTIVE}, and {LASTS}",
    ),
    "one computes": Hang(
        (GRADIENTS, WORKS, GRADIENTS),
        "rank 1 (node1, pid 101): computes but takes no step, now in decode"
        f" (metric.py:12) | {OTHERS}{CALLED} | {MAY_WAIT}",
        BUSY,
        at_last="; no rank takes a step",
    ),
    "one takes steps that no other waits for": Hang(
        (GRADIENTS, STEPS, GRADIENTS),
        "rank 1 (node1, pid 101): goes on without encoder calls, now in step"
        f" (train.py:9) | {OTHERS}{CALLED} | {MAY_WAIT}",
        "90 INFO",
    ),
    "one is stopped, or holds Python's lock": Hang(
        (GRADIENTS, STOPPED, GRADIENTS),
        "rank 1 (node1, pid 101) answers nothing, its connection stands: stopped, or"
        f" Python's lock (GIL) is held, or it has no core | {OTHERS}",
        # Asked twice; and it is not known that it had stood still before.
        "92 WARNING page 152 WARNING 211 ERROR 216 exit",
    ),
    "one was killed": Hang(
        (GRADIENTS, KILLED, GRADIENTS),
        f"rank 1 (node1, pid 101): its process has gone | {OTHERS}",
        f"30 gone {AT_ONCE}",
    ),
    "one has left": Hang(
        (GRADIENTS, HAS_LEFT, GRADIENTS),
        "rank 1 (node1, pid 101) has left: it ended, or destroyed its process group |"
        f" {OTHERS}",
    ),
    "one makes another collective": Hang(
        (GRADIENTS, GATHER, GRADIENTS),
        f"rank 1 (node1, pid 101): all_gather, in score (train.py:55){CALLED} |"
        f" {OTHERS}{CALLED} | {UNEVEN}",
    ),
    "all are in one collective": Hang(
        (BARRIER,) * 3, f"ranks 0-2: barrier, in save (train.py:31) | {ALL_IN}"
    ),
    "all read": Hang(
        (READS,) * 3,
        "no rank moves: ranks 0-2: read (data.py:41)",
        why="no rank moves",
    ),
    "all poll": Hang(
        (POLLS,) * 3,
        f"ranks 0-2: wait_for_file (data.py:7) | {NOT_KNOWN}",
        INFO_TWICE,
        LASTS,
        "; no rank has moved for ",
    ),
    "all compute": Hang((WORKS,) * 3, "", ""),
    "others perhaps wait for the GPU": Hang(
        (GPU, READS, GPU),
        "rank 1 (node1, pid 101): read (data.py:41) | ranks 0, 2: perhaps the GPU, in"
        " item(), in item (train.py:11) | that they wait is a guess, by a method's name",
        "90 WARNING page 150 WARNING 270 WARNING 510 WARNING 630 ERROR 635 exit",
        LASTS,
    ),
    "all perhaps wait for the GPU": Hang(
        (GPU,) * 3,
        f"ranks 0-2: perhaps the GPU, in item(), in item (train.py:11) | {ALL_IN}",
        INFO_TWICE,
        LASTS,
        "; no rank has moved for ",
    ),
    "one waits for a person": Hang(
        (RECEIVES, ASKS, RECEIVES),
        "rank 1 (node1, pid 101) waits for a request: input() | ranks 0, 2:"
        " broadcast_object_list, in next_request (serve.py:5)",
        "90 INFO",
    ),
    "one perhaps waits for a request, and others for what it broadcasts": Hang(
        (RECEIVES, QUEUE, RECEIVES),
        "rank 1 (node1, pid 101) waits for a request: queue.get() | ranks 0, 2:"
        " broadcast_object_list, in next_request (serve.py:5)",
        "90 INFO",
    ),
    "one perhaps waits for a request, and others for its gradients": Hang(
        (GRADIENTS, QUEUE, GRADIENTS),
        f"rank 1 (node1, pid 101): get (serve.py:2) | {OTHERS}",
    ),
}


def outline(rank: Rank, hang: Hang) -> str:
    """Its lines, as Hang.told has them; their words are compared here."""
    events = []
    for at, level, text in rank.lines:
        idle, _, verdict = text.partition(" s. ")
        if level == "ERROR":
            assert f"more than stall_exit=120 s, and {hang.why}: this" in text
        elif verdict:
            assert idle == f"no encoder call for {at - (HANGS_AT - 0.5):.0f}"
            more = hang.at_last if level == "WARNING" else ""
            assert verdict.startswith(hang.text + more)
            assert more or verdict == hang.text
        else:
            assert "this job: gone: rank 1 of 3 | rank 1 (" in text
            level = "gone"
        events.append((at, level))
    events += [(page.at, "page") for page in rank.pages]
    events.append((rank.exited_at, "exit"))
    found, seconds = [], -1
    for at, event in sorted(events, key=lambda one: one[0]):
        if at < 2000:
            found += [str(int(at))] * (int(at) != seconds) + [event]
            seconds = int(at)
    return " ".join(found)


@pytest.mark.parametrize("name", HANGS)
def test_what_is_said_when_and_who_is_ended(name: str) -> None:
    hang = HANGS[name]
    job = Job([(0, [TRAINS] * 3), (HANGS_AT, hang.doing)])
    job.run(1500, **EVERY_60_S)
    assert outline(job.ranks[0], hang) == hang.told
    silent = hang.told.replace(" page", "")  # one rank for all
    assert outline(job.ranks[2], hang) == silent
    if hang.doing[1] in (WORKS, STEPS, STOPPED, KILLED, HAS_LEFT):
        silent = ""
    assert outline(job.ranks[1], hang) == silent


def run(*rows: Row, until: float = 1500, **settings: Any) -> list[Rank]:
    """Of ranks that train until second 30, unless the first row is there before."""
    first = (0, [TRAINS] * len(rows[0][1]))
    before = [first] * (rows[0][0] > 0)
    is_cut = settings.pop("is_cut", False)
    settings = {**EVERY_60_S, **settings}
    return Job([*before, *rows], is_cut=is_cut).run(until, **settings).ranks


def stalls(rank: Rank) -> list[tuple[int, str]]:
    return [(int(one.at), one.level) for one in rank.lines if " s. " in one.text]


def test_what_on_stall_is_given() -> None:
    rank, _, _ = run((HANGS_AT, ONE_READS), until=100)
    (told,) = [page.content for page in rank.pages]
    assert (told["rank"], told["world_size"], told["level"]) == (0, 3, "WARNING")
    assert (told["idle_s"], told["remark"]) == (60.6, "")
    assert told["text"] == rank.lines[0].text
    (missing,) = told["missing"]
    assert missing["rank"] == 1
    assert (missing["kind"], missing["where"]) == ("elsewhere", "read (data.py:41)")
    assert [group["ranks"] for group in told["groups"]] == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("rows", "told_at"),
    [
        # Setting up may take any time.
        ([(0, [READS] * 3)], [600, 1200]),
        ([(0, [WORKS] * 3)], []),
        # After fewer collectives than DDP's set-up may have.
        ([(0, [STEPS] * 3), (2, [GRADIENTS, POLLS, GRADIENTS])], [602]),
        # Who has not run at all for so long is in one wait, which is sure.
        ([(0, [STEPS] * 3), (2, ONE_READS)], [62, 122, 242, 482, 602]),
    ],
)
def test_before_the_first_steps_less_is_said_and_nobody_is_ended(
    rows: list[Row], told_at: list[int]
) -> None:
    for rank in run(*rows, until=1201):
        assert stalls(rank) == [(at, "WARNING") for at in told_at]
        assert rank.exited_at > 1500


@pytest.mark.parametrize("goes_on", [TRAINS, STEPS])
def test_where_nobody_can_be_asked_a_rank_ends_that_waits_and_none_that_goes_on(
    goes_on: Doing,
) -> None:
    row = (HANGS_AT, [GRADIENTS, goes_on, GRADIENTS])
    waits, going_on, _ = run(row, until=400, is_cut=True)
    (error,) = [one.text for one in waits.lines if one.level == "ERROR"]
    assert "waits in backward, which reduces the gradients, and the oth" in error
    assert int(waits.exited_at) == 155
    assert stalls(going_on) == [] and going_on.exited_at > 400


@pytest.mark.parametrize(
    ("then", "said"),
    [(TRAINS, []), (WORKS, ["this rank goes on: stall_exit does not end it"])],
)
def test_a_rank_that_goes_on_before_its_end_is_not_ended(
    then: Doing, said: list[str]
) -> None:
    """Every rank ends some seconds after it has decided that."""
    goes_on = (153, [then] * 3), (250, [TRAINS] * 3)
    for rank in run((HANGS_AT, [READS] * 3), *goes_on, until=300):
        *on, over = [one.text for one in rank.lines if one.at > 152]
        assert on == said and over.startswith("encoder calls go on, after ")
        assert rank.exited_at > 300


@pytest.mark.parametrize(("then", "exits_at"), [(READS, 155), (HAS_LEFT, 152)])
def test_on_stalls_command_is_waited_for_also_where_the_process_ends_meanwhile(
    then: Doing, exits_at: int
) -> None:
    """stall_exit has decided, and then training ends by the error of another rank's end."""
    rank, _ = run((HANGS_AT, [READS] * 2), (152, [then] * 2), until=300)
    assert int(rank.exited_at) == exits_at
    assert rank.waited_for_page == [rank.exited_at]


@pytest.mark.parametrize(
    ("doing", "been"),
    [(ONE_READS, "; rank 1 had been in read (data.py:41)"), ([POLLS] * 3, "")],
)
def test_that_a_stall_is_over_is_said_with_where_the_missing_rank_had_been(
    doing: list[Doing], been: str
) -> None:
    for rank in run((HANGS_AT, doing), (100, [TRAINS] * 3), until=150):
        _, (_, level, text) = rank.lines
        assert (level, text) == ("INFO", f"encoder calls go on, after 71 s{been}")


@pytest.mark.parametrize(
    ("doing", "text"),
    [
        (STOPPED, "ranks 0-1: answer nothing, their connections stand: "),
        (KILLED, "ranks 0-1: their processes have gone | "),
        (HAS_LEFT, "ranks 0-1: have left: they ended, or destroyed their process g"),
        (GPU, "that ranks 0-1 wait is a guess, by a method's name; which of them is"),
    ],
)
def test_of_several_ranks_that_do_the_same_one_thing_is_said(
    doing: Doing, text: str
) -> None:
    *_, rank = run((HANGS_AT, [doing, doing, GRADIENTS]), until=100)
    assert text in rank.lines[-1].text


@pytest.mark.parametrize(("stall_exit", "is_asked_again"), [(120, True), (60, False)])
def test_a_rank_that_is_silent_for_a_moment_is_asked_again_before_a_stall_is_said(
    stall_exit: int, is_asked_again: bool
) -> None:
    """As while py-spy reads its stack. Where the end comes soon, it is said all the same."""
    moment = (89, [GRADIENTS, STOPPED, GRADIENTS]), (91, ONE_READS)
    rank, *_ = run((HANGS_AT, ONE_READS), *moment, until=120, stall_exit=stall_exit)
    text = rank.lines[0].text
    assert ("rank 1 (node1, pid 101): read (data.py:41)" in text) == is_asked_again
    assert ("answers nothing" in text) != is_asked_again


@pytest.mark.parametrize(("at", "before"), [(80, []), (100, [(90, "WARNING")])])
def test_a_job_that_was_suspended_begins_anew(
    at: int, before: list[tuple[int, str]]
) -> None:
    """As by `scontrol suspend`: what was seen before it is no evidence."""
    for rank in run((HANGS_AT, ONE_READS), (at, [STOPPED] * 3), (1000, ONE_READS)):
        assert stalls(rank) == [*before, (1060, "WARNING"), (1120, "WARNING")]
        assert int(rank.exited_at) == 1125


def test_a_server_without_requests_is_said_once_and_not_between_any_two() -> None:
    idle = [RECEIVES, ASKS, RECEIVES]
    for rank in run((HANGS_AT, idle), (400, [STEPS] * 3), (401, idle)):
        assert stalls(rank) == [(90, "INFO")]
        assert not rank.pages and rank.exited_at > 1500


def test_a_hang_after_long_work_is_ended() -> None:
    for rank in run((HANGS_AT, [GRADIENTS, WORKS, GRADIENTS]), (400, ONE_READS)):
        assert 400 + 120 < rank.exited_at < 400 + 2 * 120
        assert f", and {IN_A_COLLECTIVE}: " in rank.lines[-1].text


@pytest.mark.parametrize(("doing", "ends_at"), [(POLLS, 150), (SAVES, 630)])
def test_who_waited_and_was_ended_is_evidence_but_where_a_checkpoint_is_saved(
    doing: Doing, ends_at: int
) -> None:
    """stall_exit has ended it, perhaps: the rank that it waited for must end, too."""
    _, rank = run((HANGS_AT, [BARRIER, doing]), (140, [KILLED, doing]))
    (error,) = [one for one in rank.lines if one.level == "ERROR"]
    gone = "and rank 0 waited in a collective, and is gone now: "
    assert (int(error.at), gone in error.text) == (ends_at, doing is POLLS)


@pytest.mark.parametrize(
    ("doing", "pager"),
    [
        # Who computes does not report the stall.
        ([WORKS, READS, BARRIER], [1]),
        ([WAITS_FOR_CHILD, WAITS_FOR_CHILD, READS], [2]),
        ([KILLED, READS, GRADIENTS], [1]),
        ([STOPPED, READS, GRADIENTS], [1]),
        ([WAITS_FOR_CHILD, BARRIER_AND_CHILD], []),
    ],
)
def test_one_rank_runs_on_stall(doing: list[Doing], pager: list[int]) -> None:
    ranks = run((HANGS_AT, doing), until=300, stall_exit=0)
    assert [rank.number for rank in ranks for _ in rank.pages] == pager
    not_run = "on_stall='page' is not run: each rank that can be asked is in os.wait()"
    told = {rank.number for rank in ranks for one in rank.lines if not_run in one.text}
    assert told == (set() if pager else {0})


@pytest.mark.parametrize(
    ("then", "at", "pages"),
    [(TRAINS, 89.9, [(1, 150)]), (KILLED, 89.9, []), (KILLED, 89.8, [(1, 90)])],
)
def test_where_the_rank_that_was_to_run_on_stall_does_not_say_the_stall_another_does(
    then: Doing, at: float, pages: list[tuple[int, int]]
) -> None:
    """Rank 0 has answered the question of second 89.8. Once it is gone it may have run it."""
    rows: list[Row] = [
        (HANGS_AT, [READS, *ONE_READS[1:]]),
        (at, [then, *ONE_READS[1:]]),
    ]
    ranks = run(*rows, until=400, stall_exit=0)
    assert [(one.number, int(page.at)) for one in ranks for page in one.pages] == pages


# Jobs drawn by chance: in the small, a stall of 20 s ends a process.
SMALL = {"stall_timeout": 8, "stall_exit": 20}
LONG_S = 2.2 * 20
LONGEST_S = 12 * 8  # after ten times, what may end by itself counts as a hang
PIECE_S = 20 / 5  # of work, in which nothing is seen to move
SIZE = 3
Piece = tuple[float, list[Doing]]  # for so many seconds, what each rank does


class Draw:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def one(self, does: Doing, others: Doing = BARRIER) -> list[Doing]:
        who = self.chance.randrange(SIZE)
        return [does if rank == who else others for rank in range(SIZE)]

    def pieces(self) -> Iterator[float]:
        left = LONG_S
        while left > 0:
            seconds = self.chance.uniform(PIECE_S / 4, PIECE_S)
            yield seconds
            left -= seconds

    def long(self) -> float:
        return self.chance.uniform(20, LONG_S)


SLOW_STEPS = replace(STEPS, every_s=PIECE_S)
# What one does, and the others meanwhile.
LASTS_LONG = (
    (WORKS, BARRIER),
    (SAVES, BARRIER),
    (replace(SAVES, activity="a compilation"), BARRIER),
    (replace(SAVES, activity="an export"), BARRIER),
    (ASKS, RECEIVES),
    (POLLS, GPU),
    (SLOW_STEPS, BARRIER),  # it is far ahead
    (BARRIER, SLOW_STEPS),  # they have a group of their own
)


def one_is_long_at_something(draw: Draw) -> Iterator[Piece]:
    yield draw.long(), draw.one(*draw.chance.choice(LASTS_LONG))


def one_works_and_reads(draw: Draw) -> Iterator[Piece]:
    doing = draw.one(WORKS)
    reads = [READS if one is WORKS else one for one in doing]
    for seconds in draw.pieces():
        yield 0.8 * seconds, doing
        yield 0.2 * seconds, reads


def each_time_another_is_slow(draw: Draw) -> Iterator[Piece]:
    for seconds in draw.pieces():
        yield seconds, draw.one(READS)
        yield 0.5, [STEPS] * SIZE


def a_wait_that_ends_just_before(draw: Draw) -> Iterator[Piece]:
    for _ in range(3):
        yield 0.65 * 20, draw.one(READS)
        yield 0.5, [STEPS] * SIZE


def the_job_is_suspended(draw: Draw) -> Iterator[Piece]:
    """One rank after the other goes on, within moments."""
    doing = draw.one(READS)
    yield 8, doing
    stopped = [STOPPED] * SIZE
    yield draw.long(), stopped
    for rank in draw.chance.sample(range(SIZE), SIZE):
        stopped = [*stopped[:rank], doing[rank], *stopped[rank + 1 :]]
        yield 0.3, stopped
    yield 4, doing


HEALTHY: tuple[Callable[[Draw], Iterator[Piece]], ...] = (
    one_is_long_at_something,
    one_works_and_reads,
    each_time_another_is_slow,
    a_wait_that_ends_just_before,
    the_job_is_suspended,
)


def healthy_rows(draw: Draw, count: int) -> tuple[list[Row], float]:
    """And when they end."""
    at, rows = 0.0, list[Row]()
    for schedule in draw.chance.sample(HEALTHY, count):
        for seconds, doing in ((3.0, [TRAINS] * SIZE), *schedule(draw)):
            rows.append((at, doing))
            at += seconds
    return [*rows, (at, [TRAINS] * SIZE)], at + 5


def test_no_healthy_job_is_ended() -> None:
    looked = 0
    for seed in range(JOBS):
        rows, until = healthy_rows(Draw(seed), 3)
        job = Job(rows).run(until, **SMALL)
        assert all(rank.exited_at > until for rank in job.ranks), seed
        looked += any(rank.was_looked_at for rank in job.ranks)
    assert looked > JOBS / 2  # else nothing was tried


HUNG = (READS, POLLS, STOPPED, KILLED, HAS_LEFT, GATHER)


def test_every_hang_is_ended_whatever_was_before() -> None:
    """All ranks that can, together."""
    for seed in range(JOBS):
        draw = Draw(seed)
        rows, hangs_at = healthy_rows(draw, 1)
        rows.append((hangs_at, draw.one(draw.chance.choice(HUNG))))
        ranks = Job(rows).run(hangs_at + LONGEST_S, **SMALL).ranks
        ends = [rank.exited_at for rank in ranks if not rank.doing.silent]
        assert all(hangs_at + 15 < end < hangs_at + LONGEST_S for end in ends), seed
