"""All evidence of a job, judged together: who wins, what contradicts, and that nobody who waits is
accused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import CHECKPOINT, PERHAPS
from nemo_patches.tools.diagnose import conditions as f
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.frame_source import NO_LOOP
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
    Value,
)

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

SYNC = Place(
    collective="all_reduce",
    caller="the length sync (conformer_encoder.py:794)",
    way=("main (a.py:9)",),
)
ELSEWHERE = Place(
    where="read (data.py:41) < main (train.py:80)",
    way=("main (train.py:80)", "read (data.py:41)"),
)


def facts(
    rank: int, *values: Value, cite: str = "", at: float = 0.0, own: bool = True
) -> list[Fact]:
    return [
        Fact(rank, value, cite or f"node1, pid {100 + rank}", at, "node1", own)
        for value in values
    ]


def report(
    *groups: list[Fact], world: int = 3, entries: dict[str, set[int]] | None = None
) -> Diagnosis:
    return judge(
        Evidence(
            [fact for group in groups for fact in group],
            groups=entries or {},
            world_size=world,
        )
    )


def still(
    rank: int, place: Place, seconds: float = 60.0, at: float = 0.0
) -> list[Fact]:
    return facts(
        rank,
        ProcessRank(3, 100 + rank),
        Condition(f.RUNS),
        place,
        Motion(False, still_s=seconds),
        at=at,
    )


def test_who_is_in_no_collective_is_named_with_its_place() -> None:
    found = report(still(0, SYNC), still(1, ELSEWHERE), still(2, SYNC))
    first = found.findings[0]
    assert (first.id, first.ranks, found.exit_code) == (ids.MISSING_RANK, (1,), 1)
    assert "it is in read (data.py:41)" in first.text
    assert "--pid 101" in first.next_step and "node1, pid 101" in "".join(
        first.evidence
    )


def test_young_waits_are_no_hang_and_what_moves_is_not_stuck() -> None:
    young = report(still(0, SYNC, 2.0), still(1, ELSEWHERE, 2.0), still(2, SYNC, 2.0))
    assert (
        not young.findings
        and young.verdict.startswith("So far no hang: rank 1")
        and young.exit_code == 0
    )
    moves = [
        *facts(1, Condition(f.RUNS), SYNC, Motion(True, "i of train went from 5 to 9")),
    ]
    goes_on = report(still(0, SYNC), moves, still(2, ELSEWHERE))
    assert not goes_on.findings or goes_on.findings[0].ranks != (1,)


def test_a_length_sync_ends_by_itself_so_who_reported_it_late_may_be_elsewhere() -> (
    None
):
    """Ranks 0 and 1 gave it up and went on; rank 2's place is that of the moment before."""
    late = [facts(rank, Place(collective=LENGTH_SYNC), own=False) for rank in (0, 1)]
    waits = facts(2, Place(collective="all_gather"), own=False)
    found = report(*late, waits)
    assert found.findings[0].id == ids.OUT_OF_STEP and not found.findings[0].ranks
    assert found.verdict.startswith("Rank 2 is the odd one out: ")
    assert "none can end" not in found.verdict
    assert "its ranks may be elsewhere now" in found.verdict
    absent = facts(2, ELSEWHERE, own=False)
    assert "length sync, which ranks 0-1 waited in." in report(*late, absent).verdict


@pytest.mark.parametrize("place", [ELSEWHERE, replace(SYNC, collective="barrier")])
def test_stacks_of_different_moments_accuse_nobody(place: Place) -> None:
    """Of two hosts, one after the other: the second one's wait began after the first look."""
    early = still(1, place, at=1_000.0)
    found = report(still(0, SYNC, 40.0, at=1_300.0), early, world=2)
    assert [(one.id, one.ranks) for one in found.findings] == [(ids.NOT_ENOUGH, ())]
    assert found.verdict.startswith("Rank 1 was seen before the others began to wait")
    found = report(still(0, SYNC, 400.0, at=1_300.0), early, world=2)
    assert found.findings[0].id in (ids.MISSING_RANK, ids.OUT_OF_STEP)


def test_one_look_at_each_is_said_to_be_one() -> None:
    found = report(
        *(facts(rank, place) for rank, place in enumerate((SYNC, ELSEWHERE, SYNC)))
    )
    assert ", at the moment of these stacks. It has not entered" in found.verdict


@pytest.mark.parametrize(
    ("kind", "id_"),
    [(f.STOPPED, ids.STOPPED), (f.TRACED, ids.TRACED), (f.GONE, ids.KILLED)],
)
def test_who_is_held_up_or_gone_is_told_as_that(kind: str, id_: str) -> None:
    found = report(
        still(0, SYNC), facts(1, ProcessRank(3, 101), Condition(kind)), still(2, SYNC)
    )
    assert (found.findings[0].id, found.findings[0].ranks) == (id_, (1,))
    assert kind != f.STOPPED or "kill -CONT 101" in found.next_step


def test_a_cause_comes_before_all_that_follows_from_it() -> None:
    found = report(
        facts(0, Condition(f.CUT, "Connection closed by peer"), cite="train.log:9"),
        facts(
            1,
            Condition(f.RAISED, "ValueError: bad audio", "read (data.py:41)"),
            cite="train.log:5",
        ),
        facts(2, Condition(f.TERMINATED, "SIGTERM"), ELSEWHERE),
    )
    first = found.findings[0]
    assert (first.id, first.ranks) == (ids.EXCEPTION, (1,))
    assert "(data.py:41) [train.log:5]" in first.text
    assert len(found.findings) == 1


def test_what_was_raised_after_waiting_in_vain_is_no_cause() -> None:
    waited = Fact(
        0,
        Condition(f.WAITED, "Timed out waiting 1800000 ms"),
        "train.log:5",
        5,
        "train.log",
    )
    after = Fact(
        0, Condition(f.RAISED, "KeyError: 'loss'"), "train.log:9", 9, "train.log"
    )
    other = Fact(
        2, Condition(f.RAISED, "KeyError: 'loss'"), "train.log:9", 9, "train.log"
    )
    found = report([waited, after, other])
    assert found.findings[0].id == ids.WAITED_IN_VAIN and not found.findings[0].ranks


def test_alike_errors_are_told_by_type_and_frame_not_by_words() -> None:
    found = report(
        facts(0, Condition(f.RAISED, "ValueError: row 7", "read (data.py:41)"), at=5.0),
        facts(1, Condition(f.RAISED, "ValueError: row 9", "read (data.py:41)"), at=5.0),
        facts(2, Condition(f.RAISED, "ValueError: row 9", "step (train.py:4)"), at=9.0),
    )
    assert found.findings[0].ranks == (0, 1)


def numbered(rank: int, number: int, done: bool, cite: str) -> list[Fact]:
    return facts(
        rank,
        *(
            Entry(rank, "0", n, "gloo:all_reduce", "[1]", n < number or done)
            for n in (1, number)
        ),
        cite=cite,
    )


def test_numbers_name_who_is_missing_and_stacks_say_why() -> None:
    worker = Place(
        "select (selectors.py:415) < train (hang.py:114)",
        activity="its data loader",
        worker="its worker (pid 9) is in __getitem__ (hang.py:24), at a.wav",
    )
    dumps = [
        numbered(rank, 7 - (rank == 2), rank == 2, f"json_rank_{rank}")
        for rank in range(3)
    ]
    found = report(
        *dumps,
        facts(2, worker),
        facts(
            0, Condition(f.WAITED, "Timed out waiting 10000 ms"), cite="train.log:108"
        ),
        entries={"0": {0, 1, 2}},
    )
    first = found.findings[0]
    assert (first.id, first.ranks) == (ids.MISSING_RANK, (2,))
    assert "number 7 of group 0" in first.text
    assert "(hang.py:24), at a.wav" in first.text
    assert any("json_rank_0" in line for line in first.evidence)


def test_a_contradiction_is_printed_with_both_citations_and_accuses_nobody() -> None:
    dumps = [
        numbered(rank, 7 - (rank == 2), rank == 2, f"json_rank_{rank}")
        for rank in range(3)
    ]
    later = facts(2, SYNC, cite="later.json, pid 102", at=99.0)
    found = report(*dumps, later, entries={"0": {0, 1, 2}})
    assert not any(2 in one.ranks for one in found.findings)


def test_who_has_no_ending_where_connections_closed_is_the_suspect() -> None:
    found = report(
        facts(0, Condition(f.CUT, "Connection closed by peer")),
        facts(1, Condition(f.GONE)),
        facts(2, Condition(f.TERMINATED, "SIGTERM"), ELSEWHERE),
    )
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.KILLED, (1,))


def test_all_that_ended_in_good_order_is_no_finding() -> None:
    found = report(*(facts(rank, Condition(f.ENDED)) for rank in range(3)))
    assert not found.findings and found.exit_code == 0


def test_nothing_recognised_says_what_was_looked_for() -> None:
    found = judge(Evidence(looked_for=["stacks", "the watchdog's lines"]))
    assert found.exit_code == 2 and "stacks; the watchdog's lines" in found.verdict


# Who is further on: train() has a loop of epochs at line 10, in it one of batches at line 11 to 13,
# and then validates.
def in_train(
    line: int, epoch: int, batch_idx: int, loop_of_batches: int, collective: str
) -> Place:
    epochs, batches = "epoch of train (train.py)", "batch_idx of train (train.py)"
    return Place(
        collective=collective,
        caller=f"train (train.py:{line})",
        way=(
            "<module> (train.py:80)",
            f"train (train.py:{line})",
            f"{collective} (distributed_c10d.py:9)",
        ),
        counters={epochs: epoch, batches: batch_idx},
        loops={epochs: 10, batches: loop_of_batches},
    )


@pytest.mark.parametrize(
    ("batch_idx", "id_", "words"),
    [
        (
            4,
            ids.FEWER_BATCHES,
            (
                "Rank 1 had fewer batches: ranks 0, 2 are still in the loop, at batch_idx of"
                " train (train.py) = 5, where rank 1 came to 4."
            ),
        ),
        (
            5,
            ids.SKIPPED,
            "Rank 1 came to the loop's end, after as many steps, without this call",
        ),
    ],
)
def test_within_an_epoch_its_batches_tell_and_what_to_do_goes_with_the_reason(
    batch_idx: int, id_: str, words: str
) -> None:
    ahead = in_train(
        14, epoch=0, batch_idx=batch_idx, loop_of_batches=10, collective="all_reduce"
    )
    behind = in_train(
        12, epoch=0, batch_idx=5, loop_of_batches=11, collective="broadcast"
    )
    found = report(still(0, behind), still(1, ahead), still(2, behind))
    first = found.findings[0]
    assert (first.id, first.ranks) == (id_, ())
    assert words in first.text
    assert first.next_step.startswith(ids.NEXT_STEPS[id_])
    is_uneven = id_ == ids.FEWER_BATCHES
    assert ("if it is uneven training" in first.next_step.lower()) == is_uneven


def test_an_argument_is_no_loops_counter_and_does_not_tell_of_fewer_batches() -> None:
    """A batch that was left out in a function that catches its exception; after as many, the others
    are in the last.
    """
    ahead = in_train(14, epoch=0, batch_idx=5, loop_of_batches=10, collective="barrier")
    last = in_train(12, epoch=0, batch_idx=5, loop_of_batches=11, collective="backward")
    step = "step (train.py:30)"
    behind = replace(
        last,
        way=(*last.way[:2], step, last.way[2]),
        counters={**last.counters, "batch_idx of step (train.py)": 5},
    )
    behind = replace(
        behind, loops={**last.loops, "batch_idx of step (train.py)": NO_LOOP}
    )
    [first] = report(still(0, behind), still(1, ahead), still(2, behind)).findings
    assert first.id == ids.SKIPPED
    assert "has left one out" in first.text
    alone = replace(behind, counters={"batch_idx of step (train.py)": 5})
    [first] = report(
        still(0, alone), still(1, replace(ahead, counters={})), still(2, alone)
    ).findings
    assert first.id == ids.OUT_OF_STEP
    assert "fewer batches" not in first.text


def test_in_different_calls_of_a_function_the_later_call_is_ahead_whatever_the_lines() -> (
    None
):
    """As in Lightning: advance() is called for each batch; rank 1 has a barrier of its own at its
    end.
    """
    counter = "batch_idx of advance (training_epoch_loop.py)"

    def advance(line: int, batch_idx: int, collective: str) -> Place:
        way = (
            "run (fit_loop.py:205)",
            f"advance (training_epoch_loop.py:{line})",
            f"{collective} (module.py:9)",
        )
        return Place(
            collective=collective,
            way=way,
            counters={counter: batch_idx},
            loops={counter: NO_LOOP},
        )

    [first] = report(
        still(0, advance(250, 4, "backward")),
        still(1, advance(270, 3, "barrier")),
        still(2, advance(250, 4, "backward")),
    ).findings
    assert first.id == ids.SKIPPED
    assert "= 3, ranks 0, 2 at 4: ranks 0" in first.text


@pytest.mark.parametrize(
    ("batch_idx", "id_"), [(0, ids.SKIPPED), (3, ids.FEWER_BATCHES)]
)
def test_of_a_loop_that_one_has_left_with_its_function_both_possibilities_are_told(
    batch_idx: int, id_: str
) -> None:
    counter = "batch_idx of run (evaluation_loop.py)"
    inside = Place(
        collective="barrier",
        way=(
            "fit (fit_loop.py:205)",
            "run (evaluation_loop.py:145)",
            "barrier (distributed_c10d.py:9)",
        ),
        counters={counter: batch_idx},
        loops={counter: 140},
    )
    left = Place(
        collective="broadcast",
        way=("fit (fit_loop.py:206)", "broadcast (distributed_c10d.py:9)"),
    )
    [first] = report(still(0, inside), still(1, left), still(2, inside)).findings
    assert first.id == id_
    assert "or left this call out" in first.text


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"counters": {"i of train (a.py)": 7}}, "rank 1 at i of train (a.py) = 7"),
        ({"way": ("main (a.py:12)",)}, "rank 1 by main (a.py:12)"),
    ],
)
def test_in_one_collective_at_unlike_steps_or_by_unlike_ways_one_is_ahead(
    differs: dict[str, Any], words: str
) -> None:
    place = replace(SYNC, counters={"i of train (a.py)": 6})
    other = replace(place, **differs)
    found = report(still(0, place), still(1, other), still(2, place))
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.SKIPPED, ())
    assert words in found.verdict
    # That they wait for the GPU is a guess; where one is behind, its step tells.
    guess = replace(place, collective=PERHAPS + "the GPU, in item()")
    other = replace(guess, **differs)
    first = report(still(0, guess), still(1, other), still(2, guess)).findings[0]
    assert first.id == (ids.SKIPPED if "counters" in differs else ids.NOT_ENOUGH)


def test_a_counter_of_another_loop_does_not_tell_of_fewer_batches() -> None:
    ahead = in_train(
        19, epoch=0, batch_idx=0, loop_of_batches=18, collective="all_reduce"
    )
    behind = in_train(
        12, epoch=0, batch_idx=5, loop_of_batches=11, collective="broadcast"
    )
    found = report(still(0, behind), still(1, ahead), still(2, behind))
    assert "fewer batches" not in found.findings[0].text


def test_who_is_held_where_the_others_wait_is_not_accused_while_one_is_elsewhere() -> (
    None
):
    held = facts(
        0, ProcessRank(3, 100), Condition(f.TRACED), SYNC, Motion(False, still_s=60.0)
    )
    found = report(held, still(1, ELSEWHERE), still(2, SYNC))
    assert [(one.id, one.ranks) for one in found.findings] == [(ids.MISSING_RANK, (1,))]
    assert "a debugger holds it" in "".join(found.findings[0].evidence)
    [alone] = report(held, still(1, SYNC), still(2, SYNC)).findings
    assert (alone.id, alone.ranks) == (ids.TRACED, (0,))


def test_a_checkpoint_that_is_being_written_is_no_hang() -> None:
    writes = replace(ELSEWHERE, activity=CHECKPOINT)
    found = report(
        still(0, SYNC),
        facts(1, Condition(f.RUNS), writes, Motion(True, "it wrote 3.1 MB")),
        still(2, SYNC),
    )
    assert found.verdict.startswith("So far no hang: rank 1: it writes a checkpoint")
    assert (found.exit_code, found.findings) == (0, ())
    assert report(still(0, SYNC), still(1, writes), still(2, SYNC)).exit_code == 1


def test_a_guess_at_what_others_wait_for_is_said_to_be_one() -> None:
    guess = Place(collective=PERHAPS + "the GPU, in item()", caller="train (a.py:3)")
    found = report(still(0, guess), still(1, ELSEWHERE), still(2, guess))
    assert found.findings[0].ranks == (1,)
    assert "perhaps for the GPU" in found.verdict


def test_what_is_between_two_ranks_is_no_collective() -> None:
    recv = Place(collective="recv", caller="pipeline (a.py:3)")
    found = report(still(0, recv), still(1, recv), still(2, recv))
    assert "between two ranks" in found.verdict
    assert "NCCL_DEBUG" not in found.next_step


def test_ranks_of_hosts_that_are_not_collected_are_told_beside_a_missing_one() -> None:
    found = report(still(0, SYNC), still(1, ELSEWHERE), world=4)
    assert found.findings[0].ranks == (1,)
    assert any("ranks 2-3" in line for line in found.findings[0].evidence)
    backward = Place(
        collective="backward, which reduces the gradients", caller="train (a.py:27)"
    )
    [first] = report(still(2, SYNC), still(3, backward), world=4).findings
    assert (first.id, first.ranks) == (ids.NOT_SEEN, ())
    assert "is known of ranks 0-1" in first.text


def test_a_rank_that_stands_still_is_not_accused_while_others_are_not_seen() -> None:
    found = report(still(1, ELSEWHERE))
    assert not any(one.ranks for one in found.findings) and found.exit_code == 2
