"""A rank that is not patched while others are: named on stderr and in status() within one timeout,
in every mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from typing import Any

import encoders
import pytest
from omegaconf import OmegaConf
from ranks import (
    CONNECTING_S,
    REPORT_S,
    Given,
    Job,
    Result,
    Said,
    beside_others,
    free_port,
    join_group,
    wait_for_others,
    wait_until,
)

import nemo_patches
from nemo_patches.channel.daemon import Daemon
from nemo_patches.judging.answer import Answer
from nemo_patches.judging.judgement import Judgement
from nemo_patches.sync import encoder_methods
from nemo_patches.watch import subscriber

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

TIMEOUT = 2.0


def one_is_stock(
    rank: int, size: int, mode: str, stock_rank: int
) -> tuple[float, tuple[int, ...]]:
    """The seconds until both status() and a line have named a rank, and the ranks that status()
    names.
    """
    encoder = encoders.conformer()
    wait_for_others("ready", size)
    if rank == stock_rank:
        with contextlib.suppress(RuntimeError):  # stock's reduce finds no partner
            encoders.sync(encoder, 100)
        return 0.0, ()
    nemo_patches.apply(sync=mode, timeout=TIMEOUT)  # type: ignore[arg-type]
    said = Said()
    began = time.monotonic()
    encoders.sync(encoder, 100)
    wait_until(lambda: nemo_patches.status().unannounced == (stock_rank,))
    wait_until(lambda: any("not announced itself" in line for line in said.lines))
    visible_after = time.monotonic() - began
    assert f"not patched, or not started: rank {stock_rank}" in str(
        nemo_patches.status()
    )
    wait_for_others("named", size - 1)
    return visible_after, nemo_patches.status().unannounced


def all_are_compared() -> bool:
    monitor = subscriber.monitor()
    return monitor is not None and monitor.roll.is_done


def has_said_who_is_missing() -> bool:
    monitor = subscriber.monitor()
    return monitor is not None and any(
        reason is monitor.absent and incident.said_at
        for (reason, _), incident in list(monitor.incidents._open.items())
    )


@beside_others(
    Job(one_is_stock, 3, "bounded", 1, dies=(1,)),
    Job(one_is_stock, 3, "local", 1, dies=(1,)),
)
def test_a_rank_of_stock_nemo_is_named_within_one_timeout(
    results: list[Result],
) -> None:
    for rank in (0, 2):
        visible_after, unannounced = results[rank].value
        assert unannounced == (1,)
        assert visible_after < TIMEOUT + REPORT_S
        (line,) = results[rank].lines(
            "WARNING", "not announced itself", "`nemo-patches status` there says why"
        )
        assert "rank 1 of 3" in line
        assert f"rank {rank}/3" in line
    assert results[1].lines() == []


def no_report_knows(rank: int, size: int) -> None:
    """The reports' own looks find nothing, as on a busy machine; the roll call's do."""
    encoder = encoders.conformer()
    wait_for_others("ready", size)
    if rank == 1:
        wait_for_others("named", size)
        return
    Judgement.answer = lambda *_: Answer(unknown="nothing is heard")  # type: ignore[method-assign]
    nemo_patches.apply(timeout=TIMEOUT)
    said = Said()
    encoders.sync(encoder, 100)
    wait_until(
        lambda: any("has not announced itself" in line for line in said.lines),
        REPORT_S + 2 * TIMEOUT,
    )
    wait_for_others("named", size)


@beside_others(Job(no_report_knows, 3))
def test_a_report_that_does_not_know_the_unpatched_rank_leaves_it_to_the_roll_call(
    results: list[Result],
) -> None:
    for rank in (0, 2):
        unknown, named = results[rank].lines("WARNING")
        assert "Missing: " in unknown and "announced" not in unknown
        assert "rank 1 of 3 has not announced itself" in named


def late_or_never(rank: int, size: int) -> Any:
    encoder = encoders.conformer()
    if rank == 1:
        wait_for_others("said", size)
    nemo_patches.apply(sync="local", timeout=1.0)
    encoders.sync(encoder, 100)
    if rank != 1:
        wait_until(has_said_who_is_missing)
        wait_for_others("said", size)
    wait_until(all_are_compared)
    wait_for_others("cleared", size)
    return str(nemo_patches.status())


@beside_others(Job(late_or_never, 3))
def test_a_rank_that_was_only_late_is_cleared(results: list[Result]) -> None:
    for rank, result in enumerate(results):
        assert "not started" not in result.value
        cleared = result.lines("every rank has announced itself now")
        assert len(cleared) == (rank != 1)


def flag_is_off(rank: int, size: int) -> Any:
    nemo_patches.apply(timeout=1.0)
    encoder = encoders.conformer()
    encoder.sync_max_audio_length = False
    encoder._cfg = OmegaConf.create({"sync_max_audio_length": True})  # as NeMo keeps it
    for length in (100, 200):
        encoders.sync(encoder, length)
    wait_until(all_are_compared)
    wait_for_others("done", size)
    return nemo_patches.status().encoders[0].rounds, nemo_patches.status().unannounced


@beside_others(Job(flag_is_off, 2))
def test_an_encoder_without_a_length_sync_calls_the_roll_and_no_round_and_every_rank_says_so(
    results: list[Result],
) -> None:
    assert [result.value for result in results] == [(0, ())] * 2
    # Two threads log them.
    line, all_patched = sorted(
        results[0].lines(), key=lambda line: "patched on all 2 ranks" in line
    )
    assert "patched on all 2 ranks" in all_patched
    for said in (line, *results[1].lines()):
        assert (
            "first encoder call: ConformerEncoder, sync_max_audio_length=False, and"
            " True in the config" in said
        )
        assert (
            "; the process group is initialized; it grows privately, and has no length"
            " sync" in said
        )
        assert said.endswith("; stall reports watch the job all the same")
    assert len(results[1].lines()) == 1


def calls_its_first_encoder(rank: int, size: int, port: int) -> None:
    """Rank 0 before there is a process group, too."""
    nemo_patches.apply(timeout=TIMEOUT)
    before, encoder = (
        encoders.conformer(),
        encoders.conformer(sync_max_audio_length=rank == 0),
    )
    encoder._cfg = OmegaConf.create(
        {"sync_max_audio_length": True} if rank == 0 else {}
    )
    if rank == 0:
        encoders.sync(before, 100)
    join_group(rank, size, port)
    for length in (100, 200):
        encoders.sync(encoder, length)
    wait_until(all_are_compared)
    wait_for_others("done", size)


@beside_others(Job(calls_its_first_encoder, 2, Given.PORT, group=False))
def test_every_rank_says_at_its_first_encoder_call_which_flag_is_in_force_and_what_differs_is_a_warning(
    results: list[Result],
) -> None:
    first, second = results
    said = "first encoder call: ConformerEncoder, sync_max_audio_length="
    assert (
        len(
            first.lines(
                f"{said}True, its config is not known; no process group is initialized"
            )
        )
        == 1
    )
    assert (
        len(
            first.lines(
                f"{said}True, set in the config; the process group is initialized"
            )
        )
        == 1
    )
    (line,) = second.lines(said)
    assert (
        "=False, not set; the process group is initialized; it grows privately" in line
    )
    (differing,) = first.lines(
        "WARNING", "patched on all 2 ranks: ", "; ranks differ in their settings of "
    )
    assert len(first.lines("patched on all 2 ranks")) == 1
    assert (
        "ConformerEncoder: here sync_max_audio_length=True, set in the config; rank 1: "
        in differing
    )
    assert differing.endswith("rank 1: sync_max_audio_length=False, not set")


def flag_is_not_in_force(rank: int, size: int) -> None:
    nemo_patches.apply(timeout=CONNECTING_S)
    # Until the line is said, which is of those that live.
    living = [encoders.conformer(), encoders.conformer()]
    for encoder, configured in zip(living, (False, True), strict=True):
        encoder._cfg = OmegaConf.create({"sync_max_audio_length": configured})
        encoders.sync(encoder, 100)
    wait_until(all_are_compared)
    wait_for_others("done", size)


@beside_others(Job(flag_is_not_in_force, 2))
def test_rank_0_says_at_the_start_where_an_encoder_syncs_although_its_config_says_no(
    results: list[Result],
) -> None:
    (line,) = results[0].lines("patched on all 2 ranks")
    assert line.endswith(
        "; ConformerEncoder: sync_max_audio_length is false in the config that it was"
        " made from, and not in force"
    )
    assert results[1].lines("patched") == []


BEGIN = Daemon.begin


def no_thread_for_the_monitor(self: Daemon) -> str:
    """As where the process may have no more of them, at each group's begin."""
    return "no more" if self.name.endswith("stall monitor") else BEGIN(self)


def one_has_no_stall_reports(rank: int, size: int) -> list[str] | None:
    said = Said()
    if rank == 1:
        Daemon.begin = no_thread_for_the_monitor  # type: ignore[method-assign]
    nemo_patches.apply(timeout=CONNECTING_S)
    encoder = encoders.conformer()
    for length in (100, 200):
        encoders.sync(encoder, length)
    if rank == 1:
        wait_for_others("named", size)
        encoders.sync(encoder, 300)
        return None
    wait_until(lambda: rank == 2 or said.lines)
    wait_for_others("said", 2)
    wait_until(lambda: not nemo_patches.status().unannounced)
    nemo_patches.apply(timeout=TIMEOUT)
    encoders.sync(encoder, 300)
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    assert [(missing.rank, missing.kind) for missing in stall.missing] == [(1, "late")]
    wait_for_others("named", size)
    return said.lines


@beside_others(Job(one_has_no_stall_reports, 3))
def test_a_rank_that_syncs_and_has_no_stall_reports_is_not_called_unpatched(
    results: list[Result],
) -> None:
    assert (
        "rank 1 of 3: there are no stall reports there; stderr there says why"
        in results[0].value[0]
    )
    for rank in (0, 2):
        (late,) = [
            line
            for line in results[rank].value
            if "Missing: rank 1 of 3 | rank 1 (" in line
        ]
        assert late.endswith(") is late")


def store_goes(rank: int, size: int, goes_on: bool) -> None:
    """Rank 0 has the store's server, and ends; whether rank 1 goes on past the timeout is what is
    said or not.
    """
    if rank == 0:
        wait_for_others("looked", size)
        os._exit(0)
    # Half of it for the first look, the rest for what is to come then.
    nemo_patches.apply(sync="local", timeout=8.0)
    encoders.sync(encoders.conformer(), 100)
    wait_until(lambda: nemo_patches.status().unannounced == (0,))
    wait_for_others("looked", size)
    if goes_on:
        wait_until(has_said_who_is_missing)


@beside_others(
    Job(store_goes, 2, False, dies=(0,)), Job(store_goes, 2, True, dies=(0,))
)
def test_a_store_that_is_gone_is_said_only_by_a_rank_that_goes_on(
    results: list[Result], job: Job
) -> None:
    (goes_on,) = job.settings
    lines = results[1].lines("WARNING", "every rank is patched")
    assert len(lines) == goes_on
    assert all(
        "cannot see whether every rank is patched: this rank is not connected to"
        in line
        for line in lines
    )


def one_cannot_reach_rank_0(rank: int, size: int) -> Any:
    """As behind a firewall that rejects: rank 2 finds rank 0's port closed."""
    from nemo_patches.channel import meeting

    encoder = encoders.conformer()
    if rank == 2:
        closed, find_root = free_port(), meeting.find_root

        def elsewhere(store: Any) -> Any:
            found = find_root(store)
            if found is None:
                return None
            return dataclasses.replace(found[0], port=closed), found[1]

        meeting.find_root = elsewhere
    wait_for_others("ready", size)
    nemo_patches.apply(timeout=5.0)
    said = Said()
    encoders.sync(encoder, 100)
    if rank != 2:
        words = "is patched, and cannot be reached"
        wait_until(lambda: any(words in line for line in said.lines))
        wait_until(lambda: nemo_patches.status().unannounced == ())
    wait_for_others("named", size)
    return said.lines, str(nemo_patches.status())


@beside_others(Job(one_cannot_reach_rank_0, 3))
def test_a_rank_that_cannot_reach_rank_0_is_not_called_unpatched(
    results: list[Result],
) -> None:
    first, second, third = results
    for result in (first, second):
        lines, status = result.value
        (line,) = [line for line in lines if "cannot be reached" in line]
        assert "rank 2 of 3" in line
        assert re.search(r", pid \d+: no connection to rank 0 \(.*refused", line), line
        assert not any("not patched" in line for line in lines), lines
        assert "not patched, or not started" not in status
    lines, _ = third.value
    assert any("no connection to rank 0 (" in line for line in lines)


@pytest.mark.parametrize(
    ("rank", "size", "says"), [(0, 16, True), (3, 16, False), (3, 8, True)]
)
def test_of_many_ranks_rank_0_alone_tells_of_its_first_encoder_call(
    rank: int, size: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' flags, where they differ, are in rank 0's line of what differs."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    lines: list[str] = []
    monkeypatch.setattr(encoder_methods, "report_of_rank", lines.append)
    encoder_methods._FirstCalls().say(encoders.conformer(), in_group=False)
    if says:
        wait_until(lambda: lines)
    assert bool(lines) == says
