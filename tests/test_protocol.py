"""The invariants of the protocol, over random schedules of 2 to 8 simulated ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_job import TIMEOUT, Call, Event, Gradients
from simulated_ranks import run

from nemo_patches.sync.protocol import (
    MAX_EVALUATION,
    MAX_LENGTH,
    MAX_TRAINING,
    Clock,
    LengthProtocol,
    pack,
    unpack,
)

pytestmark = pytest.mark.one_nemo

clocks = st.builds(Clock, st.integers(0, MAX_TRAINING), st.integers(0, MAX_EVALUATION))


@given(clocks, clocks, st.integers(0, MAX_LENGTH), st.integers(0, MAX_LENGTH))
def test_one_int64_orders_clock_then_length(
    one: Clock, other: Clock, short: int, long: int
) -> None:
    assert unpack(pack(one, short)) == (one, short)
    assert 0 <= pack(one, short) < 2**63
    assert (pack(one, short) < pack(other, long)) == ((one, short) < (other, long))


def test_fields_saturate_and_never_wrap() -> None:
    assert unpack(pack(Clock(1, 2), MAX_LENGTH + 5)) == (Clock(1, 2), MAX_LENGTH)
    assert unpack(pack(Clock(1, 2), -5)) == (Clock(1, 2), 0)
    last = Clock(MAX_TRAINING, MAX_EVALUATION)
    assert last.next(training=False) == Clock(MAX_TRAINING, 1)
    assert last.next(training=True) == Clock(MAX_TRAINING, 0)
    assert Clock(5, MAX_EVALUATION).next(training=False) == Clock(6, 1), "it carries"
    assert MAX_TRAINING > 10_000_000
    assert MAX_EVALUATION > 10_000
    assert MAX_LENGTH > 16_000 * 1000  # audio samples: more than a thousand seconds


def test_an_encoder_that_only_evaluates_goes_on_agreeing_when_its_count_of_evaluation_calls_is_full() -> (
    None
):
    """A frozen encoder, for two and a half times as many calls as the count holds."""
    ranks = [LengthProtocol(), LengthProtocol()]
    for call in range(MAX_EVALUATION * 5 // 2):
        lengths = call % 7, call % 5
        for protocol, length in zip(ranks, lengths, strict=True):
            assert protocol.begin(length, False, None)
        result = max([protocol.value() for protocol in ranks])
        for protocol in ranks:
            protocol.came_in_time(result, False)
        assert {protocol.agreed() for protocol in ranks} == {max(lengths)}, call


@pytest.mark.parametrize("skipped", [1, 3, 50])
def test_a_rank_that_skips_calls_where_the_count_carries_catches_up_at_its_next_call(
    skipped: int,
) -> None:
    ahead, behind = Clock(0, MAX_EVALUATION), LengthProtocol()
    behind.clock = Clock(0, MAX_EVALUATION - skipped)
    assert behind.begin(5, False, None)
    behind.came_in_time(max(behind.value(), pack(ahead.next(training=False), 9)), False)
    assert behind.clock == Clock(1, 1)
    assert behind.agreed() == 9


@st.composite
def healthy_schedules(draw: st.DrawFn) -> list[list[Event]]:
    """Every rank makes the same calls, in phases of training and evaluation, with its own lengths
    and small pauses.
    """
    size = draw(st.integers(2, 8))
    kinds: list[bool] = []
    for _ in range(draw(st.integers(1, 4))):
        kinds += [True] * draw(st.integers(0, 6)) + [False] * draw(st.integers(0, 6))
    seed = draw(st.integers(0, 2**32))
    return [_rank_events(kinds, random.Random(seed + rank)) for rank in range(size)]


def _rank_events(
    kinds: list[bool], chance: random.Random, pause: float = 1.0
) -> list[Event]:
    events: list[Event] = []
    for training in kinds:
        events.append(Call(chance.randint(1, 5000), training, chance.random() * pause))
        if training:
            events.append(Gradients())
    return events


@given(healthy_schedules())
@settings(max_examples=400)
def test_healthy_ranks_get_stocks_value_at_every_call(
    schedules: list[list[Event]],
) -> None:
    lengths = [
        [event.length for event in events if isinstance(event, Call)]
        for events in schedules
    ]
    expected = [max(together) for together in zip(*lengths, strict=True)]
    for rank in run(schedules):
        assert rank.used == expected
        assert rank.vain == []


@st.composite
def troubled_schedules(draw: st.DrawFn) -> list[list[Event]]:
    """Late, skipped, extra, doubled, evaluation-only and uneven evaluation calls, mixed, gradients
    in lockstep.
    """
    size = draw(st.integers(2, 8))
    steps = draw(st.integers(1, 60))
    trouble = draw(st.floats(0.0, 1.0))
    doubling_rank = draw(st.integers(-1, size - 1))
    evaluating_rank = draw(st.integers(-1, size - 1))
    seed = draw(st.integers(0, 2**32))
    plan = random.Random(seed)
    evaluations = {
        step: plan.randint(1, 5) for step in range(steps) if plan.random() < 0.2
    }
    return [
        list(
            _troubled(
                steps,
                trouble,
                evaluations,
                rank == doubling_rank,
                rank == evaluating_rank,
                seed + rank,
            )
        )
        for rank in range(size)
    ]


def _troubled(
    steps: int,
    trouble: float,
    evaluations: dict[int, int],
    doubles: bool,
    evaluates: bool,
    seed: int,
) -> list[Event]:
    chance = random.Random(seed)

    def call(training: bool = True) -> Call:
        late = chance.random() < trouble * 0.1
        return Call(
            chance.randint(1, 5000), training, chance.random() * (40 if late else 1)
        )

    events: list[Event] = []
    for step in range(steps):
        if chance.random() >= trouble * 0.2:
            events.append(call())
        if doubles or chance.random() < trouble * 0.1:
            events.append(call())
        events.append(Gradients())
        extra = 1 if chance.random() < trouble * 0.3 else 0
        events += [
            call(training=False)
            for _ in range(evaluations.get(step, 0) + extra + (3 if evaluates else 0))
        ]
    return events


@given(troubled_schedules())
@settings(max_examples=1500)
def test_no_schedule_deadlocks_and_the_vain_waits_are_bounded(
    schedules: list[list[Event]],
) -> None:
    for rank in run(schedules):
        assert rank.waited_in_vain <= rank.bound()


KINDS = ("skipped", "extra", "late")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_incident_costs_at_most_1_2_timeouts_however_the_ranks_race(
    kind: str, training: bool
) -> None:
    for seed in range(300):
        chance = random.Random(seed)
        size, at, culprit = chance.randint(2, 4), chance.randint(0, 10), 0
        schedules = []
        for rank in range(size):
            kinds = (
                [True] * 40 if training else [True] * 20 + [False] * 20 + [True] * 20
            )
            events = _rank_events(kinds, chance, pause=0.01)
            if rank == culprit:
                calls = [
                    index
                    for index, event in enumerate(events)
                    if isinstance(event, Call)
                ]
                index = calls[at if training else 20 + at]
                call = events[index]
                assert isinstance(call, Call)
                if kind == "skipped":
                    del events[index]
                elif kind == "extra":
                    events.insert(index, call)
                else:
                    events[index] = Call(
                        call.length, call.training, pause=chance.uniform(5, 50)
                    )
            schedules.append(events)
        for rank in run(schedules):
            assert rank.waited_in_vain <= TIMEOUT * 1.2, (seed, rank.number, rank.vain)


@pytest.mark.parametrize("asymmetry", ["calls twice on every step", "alone evaluates"])
def test_persistent_asymmetry_costs_at_most_1_3_timeouts_in_500_calls(
    asymmetry: str,
) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        schedules: list[list[Event]] = [[] for _ in range(chance.randint(2, 4))]
        for _ in range(250):
            for rank, events in enumerate(schedules):
                events.append(
                    Call(chance.randint(1, 5000), True, chance.random() * 0.01)
                )
                if rank == 0:
                    events.append(
                        Call(
                            chance.randint(1, 5000),
                            asymmetry != "alone evaluates",
                            chance.random() * 0.01,
                        )
                    )
                events.append(Gradients())
        for rank in run(schedules):
            assert rank.waited_in_vain <= TIMEOUT * 1.3, (seed, rank.number, rank.vain)


def test_ranks_are_in_step_again_soon_after_one_incident() -> None:
    """The last calls get stock's value although one call was skipped, extra or late."""
    for seed in range(200):
        chance = random.Random(seed)
        size = chance.randint(2, 4)
        schedules = [_rank_events([True] * 60, chance, pause=0.01) for _ in range(size)]
        lengths = [
            [event.length for event in events if isinstance(event, Call)]
            for events in schedules
        ]
        del schedules[0][2 * chance.randint(0, 5)]
        ranks = run(schedules)
        expected = [max(together) for together in zip(*lengths, strict=True)]
        wrong = [
            i for rank in ranks[1:] for i in range(60) if rank.used[i] != expected[i]
        ]
        assert max(wrong, default=0) < 50, (seed, wrong)


def test_an_uneven_evaluation_leaves_training_in_step() -> None:
    """One rank evaluates one batch more: nobody waits in vain, and the next training call gets
    stock's value.
    """
    chance = random.Random(1)
    kinds = [True] * 3 + [False] * 4 + [True] * 5
    schedules = [_rank_events(kinds, chance, pause=0.01) for _ in range(2)]
    extra = schedules[0].index(
        next(e for e in schedules[0] if isinstance(e, Call) and not e.training)
    )
    schedules[0].insert(extra, Call(1, training=False, pause=0.0))
    ranks = run(schedules)
    assert all(rank.vain == [] for rank in ranks)
    training = [
        [e.length for e in events if isinstance(e, Call) and e.training]
        for events in schedules
    ]
    assert (
        ranks[0].used[-5:]
        == ranks[1].used[-5:]
        == [max(pair) for pair in zip(*training, strict=True)][-5:]
    )


def test_an_evaluation_call_that_hears_of_a_later_training_call_lets_that_call_be_this_ranks_next() -> (
    None
):
    protocol = LengthProtocol()
    protocol.clock = Clock(3, 0)
    assert protocol.begin(10, False, None)
    protocol.value()
    protocol.came_in_time(pack(Clock(6, 0), 50), False)
    assert not protocol.begin(20, True, None), (
        "the round that the others waited for serves this call"
    )
    assert protocol.agreed() == 50
    assert protocol.begin(30, True, None)
    assert unpack(protocol.value()) == (Clock(7, 0), 30)
