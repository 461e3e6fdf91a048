"""Late, skipped, extra and uneven calls on real ranks: how long anyone waits, what it says, and that they recover."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import Result, Said, run_ranks, wait_until

import nemo_patches

pytestmark = pytest.mark.alone


@dataclass(frozen=True)
class Step:
    """One encoder call: seconds it took, the encoder's max_audio_length after it, this rank's own length."""

    seconds: float
    maximum: int
    length: int


@dataclass(frozen=True)
class Life:
    steps: list[Step]
    timeouts: int
    fallbacks: int
    vain: float  # seconds of waits that ran out of time


def call(encoder: torch.nn.Module, length: int) -> Step:
    return Step(encoders.sync(encoder, length), encoder.max_audio_length, length)


def life(steps: list[Step]) -> Life:
    (counters,) = nemo_patches.status().encoders
    timeout = nemo_patches.status().settings.timeout.total_seconds()
    shares = [1, 1 / 8] + [1 / 64] * counters.timeouts
    return Life(steps, counters.timeouts, counters.fallbacks, timeout * sum(shares[: counters.timeouts]))


def late_once(rank: int, size: int, late_step: int, seconds: float) -> Life:
    nemo_patches.apply(timeout=4.0)  # the next wait is an eighth of it, and must bear a busy machine
    encoder = encoders.conformer()
    steps = []
    said = Said()
    for step in range(late_step + 4):
        if rank == 1 and step == late_step:
            time.sleep(seconds)  # the straggler itself, not a wait of the test's
        steps.append(call(encoder, 100 * (step + 1) + rank))
        dist.barrier()  # as DDP's gradients
        come_in(encoder)
    if rank == 1:
        wait_until(lambda: said.lines)
    dist.barrier()
    return life(steps)


def come_in(encoder: torch.nn.Module) -> None:
    """Until the round has come on every rank. On a busy machine the barrier may be first, and a rank that does not see
    its round yet at the next call issues none: the others then wait in vain once more."""
    from nemo_patches.sync import length_sync

    sync = length_sync.sync_of(encoder)
    assert sync is not None
    wait_until(lambda: sync.handle.round is not None and sync.handle.has_come(sync.handle.round))
    dist.barrier()


@pytest.mark.names_ranks
@pytest.mark.parametrize("late_step", [0, pytest.param(3, marks=pytest.mark.matrix)])
def test_a_rank_six_seconds_late(late_step: int) -> None:
    results = run_ranks(late_once, 3, late_step, 6.0)
    for rank, result in enumerate(results):
        steps = result.value.steps
        if rank == 1:
            assert steps[late_step].seconds < 1
            (told,) = result.lines("WARNING")
            assert (
                f"other ranks waited for this one, and gave up (ConformerEncoder: training call {late_step + 1})"
                in told
            )
        else:
            assert 3.9 <= steps[late_step].seconds <= 4.5
            assert steps[late_step].maximum == steps[late_step].length
            assert result.value.timeouts == result.value.fallbacks == 1
            (warning,) = result.lines(
                "WARNING", "ConformerEncoder", f"rank {rank}/3", f"own, {steps[late_step].length}"
            )
            assert f"call {late_step + 1}:" in warning
            assert ". Missing: rank 1 of 3 | rank 1 " in warning
            assert ("rank 1 has not announced itself" in warning) == (late_step == 0)
            assert ("is elsewhere: late_once (" in warning) == (late_step > 0)
            (recovery,) = result.lines("recovered")
            assert 5.5 <= float(recovery.split("came ")[1].split(" s late")[0]) <= 8.0
        for later in range(late_step + 1, late_step + 4):
            assert steps[later].seconds < 1
            assert steps[later].maximum == 100 * (later + 1) + 2


def one_incident(rank: int, size: int, kind: str, seed: int) -> Life:
    nemo_patches.apply(timeout=1.0)
    encoder = encoders.conformer()
    chance = random.Random(seed)
    at, culprit = chance.randint(0, 6), chance.randrange(size)
    races = random.Random(seed * 10 + rank)
    steps = []
    for step in range(40):
        time.sleep(races.random() * 0.01)  # so that the ranks race, each time otherwise
        if rank == culprit and step == at:
            if kind == "extra":
                steps.append(call(encoder, 70))
            if kind == "late":
                time.sleep(2.5)
        if not (kind == "skipped" and rank == culprit and step == at):
            steps.append(call(encoder, 50 * (step + 1) + rank))
        dist.barrier()
    return life(steps)


def incidents(rank: int, size: int, seed: int) -> dict[str, Life]:
    lives = {}
    for kind in ("skipped", "extra", "late"):
        lives[kind] = one_incident(rank, size, kind, seed)
        nemo_patches.revert()
        dist.barrier()
    return lives


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_one_incident_costs_at_most_1_2_timeouts_and_one_warning(size: int, seed: int) -> None:
    results = run_ranks(incidents, size, seed)
    for result in results:
        for kind, lived in result.value.items():
            assert lived.vain <= 1.2, (kind, lived.timeouts)
            # In step again well before the end: on a busy machine not at every call (docs/design.md, "Breaker").
            stocks = [50 * (step + 1) + size - 1 for step in range(40)]
            last = [step.maximum for step in lived.steps[-25:]]
            assert set(last) & set(stocks[-25:]), kind
    for rank, result in enumerate(results):
        # One kind after the other, each on a new encoder: at most one warning for each.
        for name in ("ConformerEncoder:", "ConformerEncoder #2:", "ConformerEncoder #3:"):
            assert len(result.lines("WARNING", name, "not every rank")) <= 1, (rank, name)
    assert any(result.lines("not every rank") for result in results)


def persistent_asymmetry(rank: int, size: int, kind: str) -> Life:
    nemo_patches.apply(timeout=1.0)
    encoder = encoders.conformer()
    steps = []
    for step in range(250):
        steps.append(call(encoder, 100 + step))
        if rank == 0:
            encoder.train(kind != "evaluates alone")
            steps.append(call(encoder, 100 + step))
            encoder.train()
        dist.barrier()
    return life(steps)


@pytest.mark.one_nemo
@pytest.mark.parametrize("kind", ["calls twice on every step", "evaluates alone"])
def test_persistent_asymmetry_costs_at_most_1_3_timeouts(kind: str) -> None:
    for result in run_ranks(persistent_asymmetry, 2, kind):
        assert result.value.vain <= 1.3
        assert sum(step.seconds for step in result.value.steps) < 1.3 + 6  # the rest is work, on a busy machine


def overlapped_and_local(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("overlapped", "local"):
        nemo_patches.apply(sync=mode)
        encoder = encoders.conformer()
        steps = []
        for step in range(5):
            if rank == 1 and step == 2:
                time.sleep(1.5)
            steps.append(call(encoder, 100 * (step + 1) + rank))
            dist.barrier()
            time.sleep(0.05)  # overlapped: a round needs some time that is not ours
        found[mode] = (steps, nemo_patches.status().encoders[-1])
    return found


@pytest.mark.apply_only
def test_overlapped_and_local_never_wait() -> None:
    results = run_ranks(overlapped_and_local, 2)
    for rank, result in enumerate(results):
        assert result.lines("WARNING") == []
        for mode, (steps, counters) in result.value.items():
            assert all(step.seconds < 0.5 for step in steps), mode
            assert all(step.maximum >= step.length for step in steps)
            assert (counters.rounds > 0) == (mode == "overlapped")
        if rank == 0:  # it learns of rank 1's length one call later; here its own is larger by then
            assert result.value["local"][0][-1].maximum == 500
        assert result.lines("settings changed", "sync=local", "before: sync=overlapped")


def raises(rank: int, size: int) -> Any:
    from nemo_patches.sync.length_sync import LengthSyncTimeout

    nemo_patches.apply(timeout=0.5, on_timeout="raise")
    encoder = encoders.conformer()
    if rank == 1:
        time.sleep(1.5)
    try:
        call(encoder, 100)
    except LengthSyncTimeout as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@pytest.mark.one_nemo
def test_on_timeout_raise() -> None:
    first, second = run_ranks(raises, 2)
    assert "ConformerEncoder: training call 1" in first.value
    assert second.value == ""


def flag_off(rank: int, size: int) -> Any:
    nemo_patches.apply()
    encoder = encoders.conformer(sync_max_audio_length=False)
    step = call(encoder, 100 * (rank + 1))
    return step.maximum, nemo_patches.status().encoders[0].rounds


def test_the_encoders_own_flag_off_means_no_communication() -> None:
    if not encoders.has_flag(encoders.conformer()):
        pytest.skip("this NeMo's Conformer has no flag")
    results: list[Result] = run_ranks(flag_off, 2)
    assert [result.value for result in results] == [(100, 0), (200, 0)]
