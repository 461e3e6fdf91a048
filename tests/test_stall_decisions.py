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


def test_what_on_stall_is_given() -> None:
    job = Job([(0, [TRAINS] * 3), (HANGS_AT, [GRADIENTS, READS, GRADIENTS])])
    (page,) = job.run(100, **EVERY_60_S).ranks[0].pages
    told, line = page.content, job.ranks[0].lines[0]
    assert (told["rank"], told["world_size"], told["level"]) == (0, 3, "WARNING")
    assert (told["idle_s"], told["remark"]) == (60.6, "")
    assert told["text"] == line.text
    (missing,) = told["missing"]
    assert (missing["rank"], missing["kind"], missing["where"]) == (
        1,
        "elsewhere",
        "read (data.py:41)",
    )
    assert [group["ranks"] for group in told["groups"]] == [[1], [0, 2]]


def hangs(*doing: Doing, until: float = 1500, **settings: object) -> list[Rank]:
    rows: list[Row] = [(0, [TRAINS] * len(doing)), (HANGS_AT, doing)]
    return Job(rows).run(until, **{**EVERY_60_S, **settings}).ranks


def stalls(rank: Rank) -> list[tuple[int, str]]:
    return [(int(one.at), one.level) for one in rank.lines if " s. " in one.text]


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        # Setting up may take any time.
        ([READS] * 3, None, [(600, "WARNING"), (1200, "WARNING")]),
        ([WORKS] * 3, None, []),
        ([STEPS] * 3, [GRADIENTS, POLLS, GRADIENTS], [(602, "WARNING")]),
        # Who has not run at all for so long is in one wait, which is sure.
        (
            [STEPS] * 3,
            [GRADIENTS, READS, GRADIENTS],
            [(at, "WARNING") for at in (62, 122, 242, 482, 602)],
        ),
    ],
)
def test_before_the_first_steps_less_is_said_and_nobody_is_ended(
    first: list[Doing], then: list[Doing] | None, told: list[tuple[int, str]]
) -> None:
    rows: list[Row] = [(0, first)]
    if then is not None:
        rows.append((2, then))  # after fewer collectives than DDP's set-up may have
    for rank in Job(rows).run(1201, **EVERY_60_S).ranks:
        assert stalls(rank) == told
        assert rank.exited_at > 1500


def test_where_nobody_can_be_asked_a_rank_ends_that_waits_and_none_that_goes_on() -> (
    None
):
    for goes_on in (TRAINS, STEPS):
        rows: list[Row] = [
            (0, [TRAINS] * 3),
            (HANGS_AT, [GRADIENTS, goes_on, GRADIENTS]),
        ]
        waits, going_on, _ = Job(rows, is_cut=True).run(400, **EVERY_60_S).ranks
        (error,) = [one.text for one in waits.lines if one.level == "ERROR"]
        assert "waits in backward, which reduces the gradients, and the oth" in error
        assert int(waits.exited_at) == 155
        assert stalls(going_on) == []
        assert going_on.exited_at > 400


@pytest.mark.parametrize("then", [TRAINS, WORKS])
def test_a_rank_that_goes_on_before_its_end_is_not_ended(then: Doing) -> None:
    """Every rank ends some seconds after it has decided that."""
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (HANGS_AT, [READS] * 3),
        (153, [then] * 3),
        (250, [TRAINS] * 3),
    ]
    for rank in Job(rows).run(300, **EVERY_60_S).ranks:
        assert rank.exited_at > 300
        last = [one.text for one in rank.lines if one.at > 152]
        on = [] if then is TRAINS else ["this rank goes on: stall_exit does not end it"]
        assert last[: len(on)] == on
        assert last[len(on)].startswith("encoder calls go on, after ")
        assert len(last) == len(on) + 1


def test_on_stalls_command_is_waited_for_also_where_the_process_ends_meanwhile() -> (
    None
):
    """stall_exit has decided, and then training ends by the error of another rank's end."""
    for then in (READS, HAS_LEFT):
        rows: list[Row] = [
            (0, [TRAINS] * 2),
            (HANGS_AT, [READS] * 2),
            (152, [then] * 2),
        ]
        rank, _ = Job(rows).run(300, **EVERY_60_S).ranks
        assert int(rank.exited_at) == (155 if then is READS else 152)
        assert rank.waited_for_page == [rank.exited_at]


def test_that_a_stall_is_over_is_said_with_where_the_missing_rank_had_been() -> None:
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (HANGS_AT, [GRADIENTS, READS, GRADIENTS]),
        (100, [TRAINS] * 3),
    ]
    for rank in Job(rows).run(150, **EVERY_60_S).ranks:
        text = "encoder calls go on, after 71 s; rank 1 had been in read (data.py:41)"
        assert rank.lines[1:] == [(rank.lines[1].at, "INFO", text)]


def test_a_rank_that_is_silent_for_a_moment_is_asked_again_before_a_stall_is_said() -> (
    None
):
    """As while py-spy reads its stack. Where the end comes soon, it is said all the same."""
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (HANGS_AT, [GRADIENTS, READS, GRADIENTS]),
        (89, [GRADIENTS, STOPPED, GRADIENTS]),
        (91, [GRADIENTS, READS, GRADIENTS]),
    ]
    first, _, _ = Job(rows).run(120, **EVERY_60_S).ranks
    (line,) = first.lines
    assert "rank 1 (node1, pid 101): read (data.py:41)" in line.text
    first, _, _ = Job(rows).run(120, **{**EVERY_60_S, "stall_exit": 60}).ranks
    assert "answers nothing" in first.lines[0].text


def test_a_job_that_was_suspended_begins_anew() -> None:
    """As by `scontrol suspend`: what was seen before it is no evidence."""
    for stopped_at in (80, 100):
        rows: list[Row] = [
            (0, [TRAINS] * 3),
            (HANGS_AT, [GRADIENTS, READS, GRADIENTS]),
            (stopped_at, [STOPPED] * 3),
            (1000, [GRADIENTS, READS, GRADIENTS]),
        ]
        for rank in Job(rows).run(1500, **EVERY_60_S).ranks:
            before = [(90, "WARNING")] if stopped_at > 90 else []
            told = [(1060, "WARNING"), (1120, "WARNING")]
            assert stalls(rank) == before + told
            assert int(rank.exited_at) == 1125


def test_a_server_without_requests_is_said_once_and_not_between_any_two() -> None:
    idle = [RECEIVES, ASKS, RECEIVES]
    rows: list[Row] = [(0, [TRAINS] * 3), (30, idle), (400, [STEPS] * 3), (401, idle)]
    for rank in Job(rows).run(1500, **EVERY_60_S).ranks:
        assert stalls(rank) == [(90, "INFO")]
        assert not rank.pages and rank.exited_at > 1500


def test_a_hang_after_long_work_is_ended() -> None:
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (HANGS_AT, [GRADIENTS, WORKS, GRADIENTS]),
        (400, [GRADIENTS, READS, GRADIENTS]),
    ]
    for rank in Job(rows).run(1500, **EVERY_60_S).ranks:
        assert 400 + 120 < rank.exited_at < 400 + 2 * 120
    assert rank.lines[-1].text.split(", and ")[1].startswith(IN_A_COLLECTIVE)


def test_who_waited_and_was_ended_is_evidence_but_where_a_checkpoint_is_saved() -> None:
    """stall_exit has ended it, perhaps: the rank that it waited for must end, too."""
    for doing, then in ((POLLS, KILLED), (SAVES, KILLED)):
        rows: list[Row] = [
            (0, [TRAINS] * 2),
            (HANGS_AT, [BARRIER, doing]),
            (140, [then, doing]),
        ]
        _, left = Job(rows).run(1500, **EVERY_60_S).ranks
        (error,) = [one for one in left.lines if one.level == "ERROR"]
        if doing is POLLS:
            assert "and rank 0 waited in a collective, and is gone now: " in error.text
        assert int(error.at) == (150 if doing is POLLS else 630)


WAITS_FOR_CHILD = replace(GRADIENTS, waits_for_child=True)


@pytest.mark.parametrize(
    ("doing", "pager"),
    [
        # Who computes does not report the stall.
        ((WORKS, READS, BARRIER), 1),
        ((WAITS_FOR_CHILD, replace(READS, waits_for_child=True), BARRIER), 2),
        ((KILLED, READS, GRADIENTS), 1),
        ((STOPPED, READS, GRADIENTS), 1),
        ((WAITS_FOR_CHILD, replace(READS, waits_for_child=True), WAITS_FOR_CHILD), -1),
    ],
)
def test_one_rank_runs_on_stall(doing: tuple[Doing, ...], pager: int) -> None:
    ranks = hangs(*doing, until=300, stall_exit=0)
    assert [rank.number for rank in ranks if rank.pages] == [pager] * (pager >= 0)
    assert all(len(rank.pages) <= 1 for rank in ranks)
    not_run = "on_stall='page' is not run: each rank that can be asked is in os.wait()"
    told = [rank.number for rank in ranks for one in rank.lines if not_run in one.text]
    assert set(told) == (set() if pager >= 0 else {0})


@pytest.mark.parametrize(
    ("then", "at", "paged_at"),
    [(TRAINS, 89.9, 150), (KILLED, 89.9, 0), (KILLED, 89.8, 90)],
)
def test_where_the_rank_that_was_to_run_on_stall_does_not_say_the_stall_another_does(
    then: Doing, at: float, paged_at: int
) -> None:
    """Rank 0 has answered the question of second 89.8. Once it is gone it may have run it."""
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (HANGS_AT, [READS, READS, GRADIENTS]),
        (at, [then, READS, GRADIENTS]),
    ]
    ranks = Job(rows).run(400, **{**EVERY_60_S, "stall_exit": 0}).ranks
    pages = [(rank.number, int(page.at)) for rank in ranks for page in rank.pages]
    assert pages == ([(1, paged_at)] if paged_at else [])


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


def one_works(draw: Draw) -> Iterator[Piece]:
    yield draw.long(), draw.one(WORKS)


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


def some_reduce_while_others_wait(draw: Draw) -> Iterator[Piece]:
    yield draw.long(), draw.one(BARRIER, replace(STEPS, every_s=PIECE_S))


def one_is_far_ahead(draw: Draw) -> Iterator[Piece]:
    yield draw.long(), draw.one(replace(STEPS, every_s=PIECE_S))


def a_wait_that_ends_just_before(draw: Draw) -> Iterator[Piece]:
    for _ in range(3):
        yield 0.65 * 20, draw.one(READS)
        yield 0.5, [STEPS] * SIZE


def all_but_one_wait_for_their_gpus(draw: Draw) -> Iterator[Piece]:
    yield draw.long(), draw.one(POLLS, GPU)


def one_saves_compiles_or_exports(draw: Draw) -> Iterator[Piece]:
    what = draw.chance.choice(("a checkpoint", "a compilation", "an export"))
    yield draw.long(), draw.one(replace(SAVES, activity=what))


def one_waits_for_a_person(draw: Draw) -> Iterator[Piece]:
    yield LONGEST_S, draw.one(ASKS, RECEIVES)


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
    one_works,
    one_works_and_reads,
    each_time_another_is_slow,
    some_reduce_while_others_wait,
    one_is_far_ahead,
    a_wait_that_ends_just_before,
    all_but_one_wait_for_their_gpus,
    one_saves_compiles_or_exports,
    one_waits_for_a_person,
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
