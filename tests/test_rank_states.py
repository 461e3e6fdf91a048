"""What ranks say of themselves on its way: merged in any order, of bounded size, and harmless
whatever it is.
"""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_states import answers_of, found, state

from nemo_patches.channel.answers import (
    ENDED,
    HELD_UP,
    LONGEST_STATE,
    LOST,
    NO_ANSWER,
    NOT_HEARD,
    Answers,
    Silence,
)
from nemo_patches.channel.meeting import Member
from nemo_patches.judging.answer import Answer, RoundQuestion, answered
from nemo_patches.judging.found import Found, found_of
from nemo_patches.judging.judgement import Judge, Judgement
from nemo_patches.judging.kinds import (
    ANSWERS_NOTHING,
    ELSEWHERE,
    GONE,
    IS_LOCAL,
    LATE,
    SILENT,
)
from nemo_patches.judging.missing_rank import MissingRank, been
from nemo_patches.judging.read_facts import REFUSALS, read, read_facts

pytestmark = pytest.mark.one_nemo
QUESTION = RoundQuestion("key", 5, None)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
)


def all_merged(answers: list[Answers]) -> Answers:
    merged = Answers()
    for one in answers:
        merged.add_json(json.loads(json.dumps(one.to_json())))
    return merged


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 1 << 30))
def test_it_does_not_matter_in_what_order_answers_are_merged(
    places: list[int], seed: int
) -> None:
    size = len(places)
    answers = [
        answers_of(state(rank, f"at (a.py:{place})"))
        for rank, place in enumerate(places)
    ]
    at_once = found_of(all_merged(answers), size, (), "").states
    random.Random(seed).shuffle(answers)
    while len(answers) > 1:  # as up a tree; some come by two ways
        answers.append(all_merged([answers.pop(0), answers.pop(0), *answers[:1]]))
    in_steps = found_of(all_merged(answers), size, (), "").states
    assert in_steps == at_once
    assert sorted(at_once) == list(range(size))


def test_of_many_places_all_ranks_are_kept_and_the_size_is_bounded() -> None:
    states = [
        state(rank, f"at {'x' * 500} (a.py:{rank})", rounds={"key": rank % 3})
        for rank in range(999)
    ]
    merged = all_merged([answers_of(one) for one in states])
    assert len(json.dumps(merged.to_json())) < 64 * LONGEST_STATE
    seen = found_of(all_merged([merged]), 999, (), "").states
    assert sorted(seen) == list(range(999))
    assert all(one.rounds["key"] == rank % 3 for rank, one in seen.items())


def test_where_ranks_are_alone_at_many_places_the_ones_that_wait_together_stay_together() -> (
    None
):
    """Those that wait are merged by what they wait in, whatever the others' places are."""
    alone = [state(rank, f"at (a.py:{rank})") for rank in range(100)]
    wait = [
        state(rank, f"at (b.py:{rank % 2})", "all_reduce") for rank in range(100, 999)
    ]
    merged = all_merged([answers_of(one) for one in (*alone, *wait)])
    seen = found_of(all_merged([merged]), 999, (), "").states
    assert {one.collective for rank, one in seen.items() if rank >= 100} == {
        "all_reduce"
    }
    assert {one.collective for rank, one in seen.items() if rank < 100} == {""}


def test_of_more_kinds_than_fit_nothing_is_known_and_nobody_is_accused() -> None:
    kinds = [
        state(rank, "at (a.py:1)", rounds={f"key {rank}": 1}) for rank in range(200)
    ]
    merged = all_merged([answers_of(one) for one in kinds])
    seen = found_of(all_merged([merged]), 200, (), "")
    assert sorted({*seen.states, *seen.silent}) == list(range(200))
    assert {one.how for one in seen.silent.values()} == {NOT_HEARD}
    assert all(f"key {rank}" in one.rounds for rank, one in seen.states.items())


def test_a_group_was_seen_to_move_when_any_of_it_was() -> None:
    merged = all_merged(
        [answers_of(state(rank, still=60.0 + rank)) for rank in (2, 0, 1)]
    )
    (group,) = merged.groups.values()
    assert (group.state["rank"], group.still) == (0, 60.0)
    assert {one.still for one in found_of(merged, 3, (), "").states.values()} == {60.0}


def test_a_state_is_of_bounded_size_and_says_what_is_missing_from_it() -> None:
    large = replace(
        state(1, "x" * 600),
        rounds={f"encoder {number}" * 9: number for number in range(200)},
        worker_states=("y" * 600,) * 30,
        settings="z" * 3000,
    )
    content = large.to_json()
    told = read_facts(json.loads(json.dumps(content)))
    assert len(json.dumps(content)) <= LONGEST_STATE
    assert told is not None
    assert (told.rank, told.whole) == (1, False)
    assert told.has_come("one that has no room", 1) is None


@given(anything)
def test_what_is_no_answer_is_refused(content: Any) -> None:
    """As a whole: the connection to a rank that sends it is closed."""
    good = answers_of(state(2)).to_json()
    (key, _, still, told), *_ = good["groups"]
    answers = Answers()
    answers.add_json(good)
    for other in (
        content,
        {"groups": content, "silent": []},
        {"groups": [[key, content, still, told]], "silent": []},
    ):
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            answers.add_json(other)
    assert 2 in found_of(answers, 4, (), "").states
    assert read_facts({**told, "calls": "many"}) is None
    assert read_facts(content) is None


def test_ranks_that_do_not_exist_are_not_taken() -> None:
    assert found(state(8), size=9).states
    assert not found(state(8), size=8).states


# Who is missing from round 5.


def at_round(number: int, *ranks: int) -> list[Any]:
    return [
        state(rank, f"place_{number} (train.py:1)", rounds={"key": number})
        for rank in ranks
    ]


def missing(answer: Any) -> list[tuple[int, str]]:
    return [(one.rank, one.kind) for one in answer.missing]


def test_who_has_not_come_is_missing_and_who_does_not_answer() -> None:
    seen = found(*at_round(5, 0, 3), *at_round(4, 1), silent={2: NO_ANSWER})
    assert missing(answered(QUESTION, seen, None)) == [
        (1, "elsewhere"),
        (2, "no heartbeat"),
    ]


def test_who_waits_in_a_collective_itself_is_named_only_where_there_is_no_other() -> (
    None
):
    waits = state(1, "sync (train.py:1)", collective="all_reduce", rounds={"key": 4})
    others = at_round(5, 0, 3)
    answer = answered(QUESTION, found(*others, waits, *at_round(4, 2)), None)
    assert missing(answer) == [(2, "elsewhere")]
    answer = answered(QUESTION, found(*others, waits, silent={2: HELD_UP}), None)
    assert (missing(answer), answer.unknown) == ([], "of rank 2 nothing is heard")
    answer = answered(QUESTION, found(*others, waits, *at_round(5, 2)), None)
    assert missing(answer) == [(1, "elsewhere")]


def test_who_had_come_before_it_fell_silent_is_not_while_another_has_not() -> None:
    before = found(*at_round(5, 0, 2, 3), *at_round(4, 1))
    seen = found(*at_round(5, 0, 3), *at_round(4, 1), silent={2: NO_ANSWER})
    assert missing(answered(QUESTION, seen, before)) == [(1, "elsewhere")]
    seen = found(*at_round(5, 0, 1, 3), silent={2: ENDED})
    assert missing(answered(QUESTION, seen, before)) == [(2, "no heartbeat")]


def test_the_one_rank_of_which_nothing_is_known_is_late_where_all_others_have_come() -> (
    None
):
    seen = found(*at_round(5, 0, 1, 3), silent={2: HELD_UP})
    answer = answered(QUESTION, seen, None)
    assert (missing(answer), answer.unknown) == ([(2, "late")], "")
    seen = found(*at_round(5, 0, 1), silent={2: HELD_UP, 3: HELD_UP})
    answer = answered(QUESTION, seen, None)
    assert (missing(answer), answer.unknown) == ([], "of ranks 2-3 nothing is heard")


def test_who_came_only_just_is_named_with_where_it_was() -> None:
    before = found(*at_round(5, 0, 2), *at_round(4, 1))
    answer = answered(QUESTION, found(*at_round(5, 0, 1, 2)), before)
    assert [(one.rank, one.kind, one.where) for one in answer.missing] == [
        (1, "late", "place_4 (train.py:1)")
    ]
    answer = answered(QUESTION, found(*at_round(5, 0, 1, 2)), None)
    assert (answer.missing, answer.unknown) == ((), "")


def of_hosts(hosts: str, *lost: int) -> Found:
    """Rank 0 has come; these are lost."""
    members = [
        Member(f"node-{host}", "127.0.0.1", 1, 100 + rank)
        for rank, host in enumerate(hosts)
    ]
    states = {
        rank: state(rank, rounds={"key": 5})
        for rank in range(len(hosts))
        if rank not in lost
    }
    silent = {rank: Silence(LOST) for rank in lost}
    return Found(len(hosts), states, silent, members)


def test_a_silent_rank_has_the_host_and_pid_that_it_joined_with() -> None:
    seen = replace(of_hosts("ab", 1), silent={1: Silence(NO_ANSWER)})
    (one,) = answered(QUESTION, seen, None).missing
    assert (
        str(one)
        == "rank 1 (node-b, pid 101) answers nothing, its connection stands: stopped,"
        " or Python's lock (GIL) is held, or it has no core"
    )


def test_a_host_that_is_lost_with_all_its_ranks_is_named() -> None:
    answer = answered(QUESTION, of_hosts("aabb", 2, 3), None)
    assert [(one.rank, one.kind, one.host) for one in answer.missing] == [
        (2, "no heartbeat", "node-b"),
        (3, "no heartbeat", "node-b"),
    ]
    assert (
        answer.text(4)
        == "ranks 2-3 of 4 | all ranks of node-b (2-3): their connections were lost:"
        " the host or the network"
    )
    (one,) = answered(QUESTION, of_hosts("ab", 1), None).missing
    assert (
        str(one)
        == "all ranks of node-b (1): its connection was lost: the host or the network"
    )


def test_where_others_of_a_host_are_heard_it_is_the_network() -> None:
    (one,) = answered(QUESTION, of_hosts("abb", 2), None).missing
    assert (
        str(one) == "rank 2 (node-b, pid 102): its connection was lost: the network;"
        " node-b answers otherwise"
    )


def test_a_rank_that_takes_no_part_is_missing_also_where_it_waits_behind_its_call() -> (
    None
):
    apart = state(1, "gather (metric.py:9)", "all_gather", apart={"key": IS_LOCAL})
    question = RoundQuestion("key", 5, (40, 0))
    answer = answered(question, found(*at_round(5, 0, 2), apart), None)
    assert missing(answer) == [(1, IS_LOCAL)]


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            MissingRank(2, ELSEWHERE, where="read (a.py:1)"),
            "; rank 2 had been in read (a.py:1)",
        ),
        (MissingRank(2, SILENT, where=ANSWERS_NOTHING), "; rank 2 had not answered"),
        (
            MissingRank(2, SILENT, where="its connection was lost: the network"),
            "; rank 2 had not answered",
        ),
        (
            MissingRank(
                2,
                SILENT,
                where="all ranks of host-b (2-3): their connections were lost: the host",
            ),
            "; all ranks of host-b (2-3) could not be reached",
        ),
        (MissingRank(2, SILENT, where=GONE), ""),
        (MissingRank(2, LATE), ""),
    ],
)
def test_where_a_rank_had_been_is_a_sentence(one: MissingRank, text: str) -> None:
    assert been([one, one]) == text


def told(judge: Judge, seen: Found) -> Judgement:
    """As it comes to the other ranks."""
    sent = json.loads(json.dumps(asdict(judge.judgement(seen))))
    judgement: Judgement = read(Judgement, sent)
    return judgement


def late_in_round_5(*ranks: int) -> list[Any]:
    return [replace(one, late={"key": (5, -1, -1, -1)}) for one in at_round(5, *ranks)]


def test_a_verdict_comes_to_the_other_ranks_as_it_was_made() -> None:
    seen = found(
        *late_in_round_5(0, 3),
        *at_round(4, 1),
        state(4, "wait (a.py:1)", "barrier", still=-1.0, goes_on="calling"),
        silent={2: NO_ANSWER},
    )
    made = Judge().judgement(seen)
    there = told(Judge(), seen)
    assert there == made
    assert there.job.text() == made.job.text()
    assert missing(there.answer("key", 5)) == [
        (1, "elsewhere"),
        (2, "no heartbeat"),
    ]
    assert there.still_s() == {0: 60.0, 1: 60.0, 3: 60.0, 4: -1.0}
    assert there.answer("key", 4) == Answer()  # all have come: there is a later round
    assert there.answer("key", 6).unknown
    assert there.answer("another", 5).unknown


def test_of_many_missing_ranks_a_verdict_is_short_and_names_all() -> None:
    seen = found(*late_in_round_5(0), *at_round(4, *range(1, 999)))
    judgement = told(Judge(), seen)
    assert len(json.dumps(asdict(judgement))) < 4 * LONGEST_STATE
    answer = judgement.answer("key", 5)
    assert [one.rank for one in answer.missing] == list(range(1, 999))
    assert all(one.where for one in answer.missing[:4])


def test_the_rank_that_judges_knows_where_a_rank_was_that_has_come_meanwhile() -> None:
    judge = Judge()
    told(judge, found(*late_in_round_5(0, 2), *at_round(4, 1)))
    there = told(judge, found(*late_in_round_5(0, 1, 2)))
    (one,) = there.answer("key", 5).missing
    assert (one.rank, one.kind, one.where) == (1, "late", "place_4 (train.py:1)")


def test_who_had_come_at_any_look_is_not_missing_while_another_has_not() -> None:
    """Three looks: rank 2 had come at the first, and is silent since."""
    judge = Judge()
    silent = {2: NO_ANSWER}
    told(judge, found(*late_in_round_5(0, 2, 3), *at_round(4, 1)))
    for _ in range(2):
        there = told(
            judge, found(*late_in_round_5(0, 3), *at_round(4, 1), silent=silent)
        )
        assert missing(there.answer("key", 5)) == [(1, "elsewhere")]


@given(anything)
def test_what_is_no_verdict_is_refused(content: Any) -> None:
    good = asdict(Judge().judgement(found(*late_in_round_5(0), *at_round(4, 1))))
    for name in good:
        with contextlib.suppress(*REFUSALS):
            read(Judgement, json.loads(json.dumps({**good, name: content})))
    with contextlib.suppress(*REFUSALS):
        read(Judgement, content)


def test_ranks_of_which_it_is_not_known_how_long_they_stand_still_are_told_apart() -> (
    None
):
    states = [state(0, "a (a.py:1)", still=60.0), state(1, "a (a.py:1)", still=-1.0)]
    assert [one.still for one in found(*states).states.values()] == [60.0, -1.0]
