"""What is said of a round that does not come, and of ranks that have ended or never came: in
simulated time.

That real ranks are missing in these ways, and are seen to be, real jobs show: test_stall_reports.py,
test_peers.py, test_unpatched_rank.py, test_store_host_ends.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from simulated_watch import (
    ABSENT,
    BARRIER,
    GRADIENTS,
    HAS_LEFT,
    KILLED,
    READS,
    STEPS,
    STOPPED,
    TRAINS,
    Doing,
    Job,
    Rank,
    Row,
)

from nemo_patches.channel.answers import UNREACHED
from nemo_patches.sync.encoder_rounds import listeners
from nemo_patches.watch.late_rounds import _IS_SHORT

pytestmark = pytest.mark.one_nemo
TIMEOUT_S = 10
ROUNDS_ONLY = {"timeout": TIMEOUT_S, "stall_timeout": 0}
COMES = Doing("forward (train.py:20)", comes=TIMEOUT_S)
WAITS = Doing("forward (train.py:20)")  # still, after a pause
LATE = "Encoder: training call 62: not every rank's length came within 10.00 s"
CALLED = "; its last encoder call, 60, began"


def run(*rows: Row, until: float = 60, **settings: Any) -> list[Rank]:
    """Of ranks that train until second 30."""
    size = len(rows[0][1])
    first: list[Row] = [] if rows[0][0] == 0 else [(0, [TRAINS] * size)]
    return Job([*first, *rows]).run(until, **{**ROUNDS_ONLY, **settings}).ranks


def texts(rank: Rank) -> list[str]:
    return [line.text for line in rank.lines]


def test_a_late_round_is_said_again_with_growing_pauses_until_it_comes() -> None:
    waits, late, other = run((30, [COMES, READS, COMES]), (600, [COMES] * 3), until=610)
    for rank in (waits, other):
        assert [int(line.at) for line in rank.lines] == [40, 100, 220, 460, 600]
        assert {line.level for line in rank.lines} == {"WARNING"}
        first, *again, last = texts(rank)
        where = "Missing: rank 1 of 3 | rank 1 (node1, pid 101) is elsewhere: read (da"
        assert first.startswith(f"{LATE}. {where}")
        ages = ("0:01:10", "0:03:10", "0:07:10")
        for age, text in zip(ages, again, strict=True):
            assert f"call 62: still (after {age}) not every" in text and where in text
        been = "rank 1 had been in read (data.py:41)"
        assert last == f"Encoder: recovered: rank 1 came 570.00 s late; {been}"
    (text,) = texts(late)
    waited = "other ranks waited for this one, and gave up (Encoder: training call 62)"
    assert text == f"{waited}; it had been in read (data.py:41)"


def test_two_of_four_are_missing_for_different_reasons() -> None:
    ranks = run((30, [COMES, READS, COMES, STOPPED]))
    for rank in (ranks[0], ranks[2]):
        (text,) = texts(rank)
        assert text.startswith(f"{LATE}. Missing: ranks 1, 3 of 4 | rank 1 (node1, ")
        assert f") is elsewhere: read (data.py:41){CALLED}" in text
        assert " | rank 3 (node3, pid 103) answers nothing, its connection " in text


def test_a_rank_that_came_late_is_not_named_in_its_own_report() -> None:
    first, second, _ = run(
        (30, [COMES, READS, READS]), (45, [COMES, COMES, READS]), until=75
    )
    assert f"{LATE}. Missing: ranks 1-2 of 3 | rank 1 (" in texts(first)[0]
    assert f"{LATE}. Missing: rank 2 of 3 | rank 2 (" in texts(second)[1]
    assert [int(line.at) for line in (*first.lines, *second.lines)] == [40, 45, 55]


def test_a_rank_that_comes_just_before_the_line_is_told_with_where_it_was() -> None:
    """At half the timeout all were asked."""
    waits, _ = run((30, [COMES, READS]), (40.01, [COMES, COMES]))
    where = "rank 1 of 2 | rank 1 (node1, pid 101) is late: read (data.py:41)"
    assert texts(waits)[0].startswith(f"{LATE}. Missing: {where}")


def test_a_round_left_open_is_reported_while_the_training_thread_is_elsewhere() -> None:
    waits, _, other = run((30, [COMES, READS, COMES]), (40, [BARRIER, READS, BARRIER]))
    for rank in (waits, other):
        (text,) = texts(rank)
        assert f"{LATE}. Missing: rank 1 of 3 | rank 1 (node1, pid 101) is el" in text


def test_a_rank_that_waits_itself_after_a_call_without_a_round_is_not_blamed() -> None:
    """Rank 0 waits in vain; its next call issues no round, since that is outstanding, and it waits
    for rank 1. When rank 1 has come, it waits in vain for rank 0.
    """
    made_a_call = replace(BARRIER, every_s=1000.0, encodes=True)
    _, late = run(
        (30, [COMES, READS]),
        (41, [made_a_call, READS]),
        (50, [made_a_call, COMES]),
        (50.1, [made_a_call, replace(COMES)]),
        until=70,
    )
    assert texts(late)[-1].endswith(". Every rank has come by now")


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (KILLED, ": its process has gone"),
        (HAS_LEFT, " has left: it ended, or destroyed its process group"),
    ],
)
def test_a_rank_that_ends_while_others_wait_for_it_is_named_at_once(
    end: Doing, how: str
) -> None:
    """And has not come, also where its round had been reported."""
    for ends_at in (35, 45):
        waits, _, other = run(
            (30, [COMES, READS, COMES]), (ends_at, [COMES, end, COMES])
        )
        for rank in (waits, other):
            *late, line = rank.lines
            text = f"Encoder: gone: rank 1 of 3 | rank 1 (node1, pid 101){how}"
            assert (int(line.at), line.text) == (ends_at, text)
            assert [int(one.at) for one in late] == [40] * (ends_at == 45)


@pytest.mark.parametrize(
    ("ranks_of_a_host", "named"), [(1, "rank 0"), (2, "ranks 0-1")]
)
def test_a_rank_that_ends_after_another_was_killed_is_named_where_both_shared_a_host(
    ranks_of_a_host: int, named: str
) -> None:
    """A question finds rank 1 gone, too: by Gloo's error, or killed with rank 0 and its host's."""
    rows: list[Row] = [
        (0, [TRAINS] * 3),
        (30, [KILLED, replace(KILLED, is_known=False), GRADIENTS]),
    ]
    job = Job(rows, ranks_of_a_host=ranks_of_a_host).run(60, **ROUNDS_ONLY)
    (text,) = texts(job.ranks[2])
    assert text.startswith(f"this job: gone: {named} of 3 | rank 0 (node0, pid 100): i")


class Seen(Job):
    """With how many stalls status() has while each line is said."""

    def __init__(self, *rows: Row) -> None:
        super().__init__(rows)
        self.stalls: list[int] = []

    def _say(self, record: logging.LogRecord) -> None:
        super()._say(record)
        self.stalls.append(len(self.current.monitor.incidents.stalls()))


@pytest.mark.parametrize("doing", [KILLED, READS])
def test_a_report_can_be_seen_once_its_line_is_said(doing: Doing) -> None:
    """Who waits for it may look for the line at once, or end the process."""
    job = Seen((0, [TRAINS] * 2), (30, [GRADIENTS, doing]))
    job.run(50 if doing is KILLED else 91, stall_timeout=60)
    assert job.stalls in ([0], [0, 0])  # one line of each rank that there is
    assert len(job.ranks[0].monitor.incidents.stalls()) == 1


def test_a_rank_that_a_report_names_is_not_named_again_where_there_had_been_trouble() -> (
    None
):
    rank, _ = run(
        (0, [replace(TRAINS, trouble="no way"), ABSENT]),
        (20, [replace(COMES, trouble="no way"), ABSENT]),
        (35, [WAITS, ABSENT]),
        until=500,
    )
    first, second, *again = texts(rank)
    assert first == "cannot see whether every rank is patched: no way"
    named = ". Missing: rank 1 of 2 | rank 1 has not announced itself"
    assert named in second
    assert again and all(named in text and "still" in text for text in again)


def test_an_absent_rank_is_left_to_the_report_that_will_name_it() -> None:
    rank, _ = run((0, [TRAINS, ABSENT]), (4, [COMES, ABSENT]))
    (line,) = rank.lines
    assert (int(line.at), ". Missing: rank 1 of 2 | " in line.text) == (14, True)


def test_an_absent_rank_that_no_report_names_is_named_once() -> None:
    rank, _, _ = run((0, [TRAINS, ABSENT, Doing(silent=UNREACHED)]), until=200)
    absent_line, unreached_line = texts(rank)
    assert "rank 1 of 3 has not announced itself within 10 s" in absent_line
    assert "rank 2 of 3 is patched, and cannot be reached: " in unreached_line
    assert {int(line.at) for line in rank.lines} == {TIMEOUT_S}


def test_of_many_ranks_rank_0_says_all_of_one_that_is_absent_or_late_and_each_says_who() -> (
    None
):
    for rank in run((0, [TRAINS] * 8 + [ABSENT] + [TRAINS] * 7), until=15):
        for text in texts(rank):
            assert "rank 8 of 16 has not announced itself within 10 s" in text
            assert ("`nemo-patches status` there" in text) == (rank.number == 0)
        assert len(rank.lines) == (rank.number != 8)
    for rank in run((30, [COMES] * 8 + [READS] + [COMES] * 7)):
        for text in texts(rank):
            assert ". Missing: rank 8 of 16 | " in text
            assert ("read (data.py:41)" in text) == (rank.number == 0)
            assert text.endswith(" | where: in rank 0's line") == (rank.number > 0)
        assert len(rank.lines) == (rank.number != 8)


def test_what_differs_stands_in_the_line_of_all_ranks_however_late_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 calls its first encoder only after that line was due. Rank 2 has called another one
    first, whose own flag is no difference.
    """
    told: list[tuple[int, tuple[str, ...], bool]] = []
    is_off, other = (
        replace(TRAINS, flag=f"{name}: flag=False") for name in ("Encoder", "Other")
    )
    job = Job([(0, [TRAINS, STEPS, other]), (100, [TRAINS, is_off, other])])

    def all_announced(size: int, differences: tuple[str, ...]) -> bool:
        told.append((int(job.now), differences, job.ranks[0].monitor.roll.is_done))
        return True

    monkeypatch.setattr(listeners, "all_announced", all_announced)
    job.run(600, **ROUNDS_ONLY)
    (first, nothing, _), (later, (differs,), was_done) = told
    assert (first, nothing) == (60, ())
    assert later > 100
    assert differs == (
        "ranks differ in their settings of Encoder: here flag=True; rank 1: flag=False"
    )
    assert not was_done and job.ranks[0].monitor.roll.is_done


def test_a_timeout_is_said_however_long_the_monitor_was_kept_from_running() -> None:
    """Also where the round has come meanwhile, and this process ends."""
    brief = replace(COMES, comes=0.01)
    rank, _ = run(
        (30.03, [brief, READS]), (30.05, [brief, COMES]), (30.06, [HAS_LEFT, WAITS])
    )
    text = f"call 62: not every rank's length came within 0.01 s{_IS_SHORT}. Missing: "
    assert text in texts(rank)[0]


@pytest.mark.parametrize(
    ("waited_s", "level"), [(0.05, "INFO"), (TIMEOUT_S, "WARNING")]
)
def test_a_round_that_only_a_shortened_wait_did_not_see_come_is_no_warning(
    waited_s: float, level: str
) -> None:
    """As after an incident, on a busy machine: all ranks are there, and nobody is missing."""
    rows: list[Row] = [
        (0, [TRAINS] * 2),
        (30, [replace(COMES, comes=waited_s), COMES]),
    ]
    job = Job(rows, lag_s=waited_s + 0.3).run(60, **ROUNDS_ONLY)
    first, second = job.ranks[0].lines
    assert (first.level, second.level) == (level, level)
    more = _IS_SHORT if waited_s < TIMEOUT_S else ""
    text = f"within {waited_s:.2f} s{more}. Every rank has come by now"
    assert first.text.endswith(text)
    assert "Encoder: recovered: the missing length came " in second.text


def test_a_process_that_was_stopped_asks_before_it_says_who_is_missing() -> None:
    """As a whole job is, by `scontrol suspend`: the report was due long ago when it is first
    thought of.
    """
    rank, _ = run(
        (30, [COMES, READS]), (31, [STOPPED] * 2), (3600, [WAITS, READS]), until=3610
    )
    (text,) = texts(rank)
    assert "Missing: rank 1 of 2 | rank 1 (node1, pid 101) is elsewhere: read" in text


def test_a_round_that_was_said_early_is_one_incident_until_it_comes() -> None:
    """After a shortened wait: not once more at the timeout."""
    short = replace(COMES, comes=1.0)
    rank, _ = run((30, [short, READS]), (60, [short, COMES]), until=70)
    assert [int(line.at) for line in rank.lines] == [31, 60]
    assert "recovered: rank 1 came " in rank.lines[-1].text
