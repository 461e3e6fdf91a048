"""What ranks say of themselves on its way: merged in any order, of bounded size, and harmless whatever it is."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_states import found, state

from nemo_patches.channel.links import VANISHED
from nemo_patches.channel.survey import HELD_UP, SILENT, Silent
from nemo_patches.channel.tree import Resident
from nemo_patches.stall.answer import Question, answered
from nemo_patches.stall.found import Found
from nemo_patches.stall.rank_state import LONGEST_STATE, answer_of, decoded, encoded, groups_of, merged

pytestmark = pytest.mark.one_nemo
QUESTION = Question("key", 5, None)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 1 << 30))
def test_it_does_not_matter_in_what_order_answers_are_merged(places: list[int], seed: int) -> None:
    answers = [answer_of(state(rank, f"at (a.py:{place})")) for rank, place in enumerate(places)]
    at_once = groups_of(merged(answers), len(places))
    random.Random(seed).shuffle(answers)
    while len(answers) > 1:  # as up a tree; some come by two ways
        answers.append(merged([answers.pop(0), answers.pop(0), answers[0] if answers else []]))
    in_steps = groups_of(json.loads(json.dumps(answers[0])), len(places))
    assert sorted(in_steps, key=lambda one: one.ranks) == sorted(at_once, key=lambda one: one.ranks)
    assert sorted(rank for group in at_once for rank in group.ranks) == list(range(len(places)))


def test_of_many_places_all_ranks_are_kept_and_the_size_is_bounded() -> None:
    answers = [answer_of(state(rank, f"at {'x' * 500} (a.py:{rank})", rounds={"key": rank % 3})) for rank in range(999)]
    answer = merged(answers)
    assert len(json.dumps(answer)) < 40 * LONGEST_STATE
    groups = groups_of(answer, 999)
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(999))
    assert all(group.state.rounds["key"] == rank % 3 for group in groups for rank in group.ranks)


def test_a_group_was_seen_to_move_when_any_of_it_was() -> None:
    (group,) = groups_of(merged(answer_of(state(rank, still=60.0 + rank)) for rank in (2, 0, 1)), 3)
    assert (group.state.rank, group.state.still) == (0, 60.0)


def test_a_state_is_of_bounded_size_and_says_what_is_missing_from_it() -> None:
    large = replace(
        state(1, "x" * 600),
        rounds={f"encoder {number}" * 9: number for number in range(200)},
        worker_states=("y" * 600,) * 30,
        settings="z" * 3000,
    )
    ((ranks, told),) = groups_of(json.loads(json.dumps(answer_of(large))), 4)
    assert len(json.dumps(answer_of(large))) <= LONGEST_STATE + 200
    assert (ranks, told.whole) == ((1,), False)
    assert told.has_come("one that has no room", 1) is None


@given(anything)
def test_what_is_no_answer_is_left_out(content: Any) -> None:
    good = answer_of(state(2))
    others = [{**good[0], "ranks": content}], [{**good[0], "id": "other", "state": content}]
    mixed = merged([content, [content], *others, good])
    groups = groups_of(mixed, 4)
    assert (2,) in [group.ranks for group in groups]
    assert groups_of([{**good[0], "state": {**good[0]["state"], "calls": "many"}}], 4) == ()
    assert groups_of(decoded(encoded(good).encode()), 4) == groups_of(good, 4)


def test_ranks_that_do_not_exist_are_not_taken() -> None:
    assert groups_of(answer_of(state(8)), 9)
    assert groups_of(answer_of(state(8)), 8) == ()


# Who is missing from round 5.


def at_round(number: int, *ranks: int) -> list[Any]:
    return [state(rank, f"place_{number} (train.py:1)", rounds={"key": number}) for rank in ranks]


def missing(answer: Any) -> list[tuple[int, str]]:
    return [(one.rank, one.kind) for one in answer.missing]


def test_who_has_not_come_is_missing_and_who_does_not_answer() -> None:
    seen = found(*at_round(5, 0, 3), *at_round(4, 1), silent={2: SILENT})
    assert missing(answered(QUESTION, seen, None)) == [(1, "elsewhere"), (2, "no heartbeat")]


def test_who_had_come_before_it_fell_silent_is_not_while_another_has_not() -> None:
    before = found(*at_round(5, 0, 2, 3), *at_round(4, 1))
    seen = found(*at_round(5, 0, 3), *at_round(4, 1), silent={2: SILENT})
    assert missing(answered(QUESTION, seen, before)) == [(1, "elsewhere")]
    seen = found(*at_round(5, 0, 1, 3), silent={2: VANISHED})
    assert missing(answered(QUESTION, seen, before)) == [(2, "no heartbeat")]


def test_the_one_rank_of_which_nothing_is_known_is_late_where_all_others_have_come() -> None:
    seen = found(*at_round(5, 0, 1, 3), silent={2: HELD_UP})
    answer = answered(QUESTION, seen, None)
    assert (missing(answer), answer.unknown) == ([(2, "late")], "")
    seen = found(*at_round(5, 0, 1), silent={2: HELD_UP, 3: HELD_UP})
    answer = answered(QUESTION, seen, None)
    assert (missing(answer), answer.unknown) == ([], "of ranks 2-3 nothing is heard")


def test_who_came_only_just_is_named_with_where_it_was() -> None:
    before = found(*at_round(5, 0, 2), *at_round(4, 1))
    answer = answered(QUESTION, found(*at_round(5, 0, 1, 2)), before)
    assert [(one.rank, one.kind, one.where) for one in answer.missing] == [(1, "late", "place_4 (train.py:1)")]
    answer = answered(QUESTION, found(*at_round(5, 0, 1, 2)), None)
    assert answer.text(3) == "none, every rank has come to this call by now"


def test_a_silent_rank_has_the_host_and_pid_that_it_joined_with() -> None:
    groups = found(*at_round(5, 0)).groups
    residents = (Resident("a", 1, 1), Resident("b", 2, 1))
    seen = Found(2, groups, {1: Silent(1, SILENT, 3.0, [])}, residents=residents)
    (one,) = answered(QUESTION, seen, None).missing
    assert str(one).startswith("rank 1 (b, pid 2) has no heartbeat: stopped, ")
