"""Ranks that are not missing: no line names one; and a rank that takes no part is told as what it
is.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, cast

import encoders
import pytest
import torch.distributed as dist
from ranks import (
    Said,
    come_in,
    in_step,
    run_ranks,
    stall_monitor,
    wait_for_others,
    wait_until,
)

import nemo_patches
from nemo_patches.sync import length_sync

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
TIMEOUT = 2.0


def apart(
    rank: int, size: int, why: str
) -> tuple[list[tuple[int, str]], tuple[int, ...]]:
    encoder = cast(Any, encoders.conformer())
    wait_for_others("ready", size)
    if rank == 1:
        encoder.sync_max_audio_length = why != "flag"
    nemo_patches.apply(
        timeout=TIMEOUT, sync="local" if rank == 1 and why == "local" else "bounded"
    )
    encoders.sync(encoder, 100)
    if rank == 1:
        wait_for_others("named", size)
        return [], ()
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    wait_until(lambda: not nemo_patches.status().unannounced)
    wait_for_others("named", size)
    return [
        (one.rank, one.kind) for one in stall.missing
    ], nemo_patches.status().unannounced


@pytest.mark.parametrize(
    ("why", "kind", "text"),
    [
        (
            "flag",
            "sync_max_audio_length is false",
            "its encoder's sync_max_audio_length is false",
        ),
        ("local", "sync=local", "sync=local there"),
    ],
)
def test_a_rank_that_takes_no_part_is_told_as_what_it_is(
    why: str, kind: str, text: str
) -> None:
    results = run_ranks(apart, 3, why)
    for rank in (0, 2):
        assert results[rank].value == ([(1, kind)], ())
        (line,) = results[rank].lines("not every rank's length came")
        assert "Missing: rank 1 of 3 | rank 1 (" in line
        assert f"): {text}: it takes no part in the length sync" in line
        assert results[rank].lines("not patched, not started") == []


def apart_behind_its_call(rank: int, size: int) -> list[tuple[int, str]]:
    """It makes the same calls as the others, and waits for them in a collective after that."""
    encoder = encoders.conformer()
    wait_for_others("ready", size)
    nemo_patches.apply(timeout=TIMEOUT, sync="local" if rank == 1 else "bounded")
    missing = []
    for _ in range(2):
        encoders.sync(encoder, 100)
        if rank != 1:
            wait_until(lambda: nemo_patches.status().stalls)
            (stall,) = nemo_patches.status().stalls
            missing += [(one.rank, one.kind) for one in stall.missing]
        dist.barrier()
    return missing


def test_a_rank_that_takes_no_part_and_waits_behind_its_call_is_told_as_what_it_is() -> (
    None
):
    results = run_ranks(apart_behind_its_call, 3)
    for rank in (0, 2):
        assert set(results[rank].value) == {(1, "sync=local")}
        assert results[rank].lines("not every rank's length came")
        assert not results[rank].lines("Every rank has come")


class Interrupted(Exception):
    """The user's own."""


def interrupt(*_: Any) -> None:
    raise Interrupted


def interrupted(rank: int, size: int, function: str) -> tuple[int, list[str]]:
    """Rank 1 in the middle of a call; then rank 2 does not come to one."""
    encoder = in_step(timeout=TIMEOUT)
    sync = length_sync.sync_of(encoder)
    assert sync is not None
    if rank == 1:
        signal.signal(signal.SIGUSR1, interrupt)

        def trace(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name == function:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)

        sys.settrace(trace)
        with pytest.raises(Interrupted):
            encoders.sync(encoder, 100)
        sys.settrace(None)
    if sync.rounds.issued == 2:  # else what rank 1 has to say is on its way
        encoders.sync(encoder, 100)
    come_in(encoder)
    encoders.sync(encoder, 110)
    come_in(encoder)
    said = Said()
    if rank != 2:
        encoders.sync(encoder, 200)
        wait_until(lambda: nemo_patches.status().stalls)
    wait_for_others("named", size)
    if rank == 2:
        encoders.sync(encoder, 200)
    come_in(encoder)
    assert sync.round is not None
    return sync.round.number, [line for line in said.lines if "Missing: " in line]


@pytest.mark.parametrize("function", ["value", "issue", "post", "_wake"])
def test_an_interrupted_call_leaves_the_numbers_of_the_rounds_alone(
    function: str,
) -> None:
    results = run_ranks(interrupted, 3, function)
    assert len({number for number, _ in (result.value for result in results)}) == 1
    for rank in (0, 1):
        (line,) = results[rank].value[1]
        assert "Missing: rank 2 of 3 | rank 2 (" in line


def uneven_evaluations(rank: int, size: int, metrics: str) -> list[str]:
    """Two, of which rank 2 has fewer batches; after each it waits for the others, and all train on."""
    encoder = in_step(timeout=TIMEOUT, metrics=metrics)
    said = Said()
    for _ in range(2):
        encoder.eval()
        for batch in range(1 if rank == 2 else 3):
            encoders.sync(encoder, 100 + batch)
        if rank != 2:
            wait_until(is_reported)
        dist.all_gather_object([None] * size, rank)
        encoder.train()
        for _ in range(3):
            encoders.sync(encoder, 100)
            come_in(encoder)
    return said.lines


def is_reported() -> bool:
    """Whether this rank's stall monitor has dealt with a round that is late."""
    monitor = stall_monitor()
    return any(
        reason is monitor.late_rounds and incident.said_at
        for (reason, _), incident in list(monitor.incidents._open.items())
    )


def test_ranks_that_have_ended_an_evaluation_are_not_missing_where_metrics_are_deferred() -> (
    None
):
    results = run_ranks(uneven_evaluations, 3, "deferred")
    for rank, result in enumerate(results):
        assert result.value == []
        ended = result.lines(
            "INFO",
            "rank 2 has ended this evaluation, it had fewer batches; the others go on"
            " with ",
        )
        assert len(ended) == (rank != 2)


def test_they_are_where_every_batch_of_an_evaluation_waits_for_all_ranks() -> None:
    results = run_ranks(uneven_evaluations, 3, "stock")
    for rank in (0, 1):
        lines = [
            line
            for line in results[rank].value
            if "Missing: rank 2 of 3 | rank 2 (" in line
        ]
        assert len(lines) == 2
        assert "waits itself, in all_gather_object: " in lines[0]
        assert results[rank].lines("has ended this evaluation") == []
