"""Diagnoses of simulated traces: every verdict for what it is, and none for what only looks like
it.
"""

from __future__ import annotations

import bisect
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from interpreters import python
from simulated_job import (
    PHASES,
    Call,
    Collective,
    DdpForward,
    Event,
    Exit,
    Gradients,
    Killed,
    evaluation,
    steps,
)
from simulated_traces import Setup, file_name, header, write

from nemo_patches.judging.kinds import ELSEWHERE, GONE, SILENT
from nemo_patches.tools.diagnose import command
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.decoder import LONGEST_LINE, decode
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tools.diagnose.folder import Folder, Start, UnreadableError
from nemo_patches.tools.diagnose.rank_trace import RankTrace
from nemo_patches.tools.diagnose.watch import once
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

OUT = [Exit()]
CLOSED = Exit(
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
)  # the gradients' reduce


@dataclass(frozen=True)
class Scenario:
    """What each rank does, and the first finding that there must be: its id, ranks, call and phase."""

    schedules: list[list[Event]]
    finding: str
    ranks: tuple[int, ...]
    call: int = 0
    phase: str = ""
    setups: dict[int, Setup] = field(default_factory=dict)
    reports: bool = True


def four(
    common: list[Event],
    odd: list[Event],
    usual: list[Event],
    rank: int = 2,
    size: int = 4,
) -> list[list[Event]]:
    """All ranks do what is common, then one of them something else than the others."""
    return [common + (odd if one == rank else usual) for one in range(size)]


def long(phase: str) -> Call:
    return Call(length=9000, stuck=phase)


def with_a_second(count: int, left_out: int) -> list[Event]:
    """Training steps of two encoders; of the second one this call is left out."""
    each = [
        [
            Call(),
            *([Call(encoder=1, pause=0.05)] if step != left_out else []),
            Gradients(),
        ]
        for step in range(1, count + 1)
    ]
    return [event for step in each for event in step]


SCENARIOS = {
    "stuck before the encoder": Scenario(
        four(steps(70), [], steps(1), 5, 8),
        ids.MISSING_RANK,
        (5,),
        71,
    ),
    "stuck before it, no stall reports": Scenario(
        four(steps(70), [], steps(1)), ids.MISSING_RANK, (2,), 71, reports=False
    ),
    "stuck before it, in evaluation": Scenario(
        four(steps(20), evaluation(3), evaluation(10)), ids.MISSING_RANK, (2,), 24
    ),
    "two are stuck before it": Scenario(
        [steps(30) + ([] if rank in (1, 6) else steps(1)) for rank in range(8)],
        ids.MISSING_RANK,
        (1, 6),
        31,
    ),
    "stuck before it, after uneven evaluations": Scenario(
        [
            (steps(5) + evaluation(4 + (rank == 0))) * 3
            + steps(9)
            + ([] if rank == 1 else steps(1))
            for rank in range(4)
        ],
        ids.MISSING_RANK,
        (1,),
        37,
    ),
    "stuck before it, sync=local": Scenario(
        four(steps(70), [], steps(1)),
        ids.MISSING_RANK,
        (2,),
        71,
        setups={rank: Setup(sync="local") for rank in range(4)},
    ),
    **{
        f"all inside: {phase}": Scenario(
            [[*steps(20), long(phase)] for _ in range(4)],
            ids.ALL_INSIDE,
            (0, 1, 2, 3),
            21,
            phase,
        )
        for phase in PHASES
    },
    **{
        f"one inside, the others out: {phase}": Scenario(
            four(steps(20), [long(phase)], [Call(9000), Gradients()]),
            ids.SOME_INSIDE,
            (2,),
            21,
            phase,
        )
        for phase in PHASES[1:]
    },
    "all out": Scenario(
        [[*steps(30), Call()] for _ in range(4)],
        ids.OUTSIDE,
        (0, 1, 2, 3),
        31,
    ),
    "killed before a call": Scenario(
        four(steps(30), [Killed()], steps(5)), ids.KILLED, (2,), 31
    ),
    "killed inside a call": Scenario(
        four(steps(30), [Call(stuck="layers", dies=True)], [Call(), CLOSED]),
        ids.KILLED,
        (2,),
        31,
        "layers",
    ),
    "killed, no stall reports": Scenario(
        four(steps(30), [Killed()], steps(5)), ids.KILLED, (2,), 31, reports=False
    ),
    "no heartbeat": Scenario(
        four(steps(30), [Killed(gone=False)], steps(5)), ids.SILENT, (2,), 31
    ),
    "ended early": Scenario(
        four(steps(30), OUT, steps(5)),
        ids.ENDED,
        (2,),
        31,
    ),
    "exception": Scenario(
        four(steps(30), [Call(raises="RuntimeError"), *OUT], steps(5)),
        ids.EXCEPTION,
        (2,),
        31,
    ),
    "exception on all ranks": Scenario(
        [[*steps(30), Call(raises="ValueError"), *OUT] for _ in range(4)],
        ids.EXCEPTION,
        (0, 1, 2, 3),
        31,
    ),
    "not patched": Scenario(
        four(steps(3), [], []),
        ids.MISSING_RANK,
        (2,),
        1,
        setups={2: Setup(patched=False)},
    ),
    "not traced": Scenario(
        [steps(30) + OUT] * 4,
        ids.UNTRACED,
        (2,),
        setups={2: Setup(traced=False)},
    ),
    "one evaluation call more": Scenario(
        [
            (steps(20) + evaluation(6 if rank == 3 else 5)) * 2 + steps(4) + OUT
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (3,),
        26,
    ),
    "one evaluation call fewer": Scenario(
        [
            (steps(20) + evaluation(4 if rank == 3 else 5)) * 2 + steps(4) + OUT
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (3,),
        25,
    ),
    "two evaluation calls more, sync=local": Scenario(
        [
            steps(20) + evaluation(7 if rank == 3 else 5) + steps(4) + OUT
            for rank in range(2)
        ]
        + [steps(20) + evaluation(7) + steps(4) + OUT],
        ids.UNEVEN_CALLS,
        (2,),
        26,
        setups={rank: Setup(sync="local") for rank in range(3)},
    ),
    "one evaluation more, in mid-epoch": Scenario(
        [
            steps(20)
            + evaluation(3)
            + (steps(10) + evaluation(3) + steps(14) if rank == 2 else steps(24))
            + OUT
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (2,),
        34,
    ),
    "one evaluation more, and all after it": Scenario(
        [
            steps(9)
            + (steps(10) + evaluation(3) + steps(14) if rank == 1 else steps(24))
            + evaluation(3) * 2
            + OUT
            for rank in range(2)
        ],
        ids.UNEVEN_CALLS,
        (),  # of two ranks either may be wrong
        20,
    ),
    "an evaluation of which no end is known": Scenario(
        [
            steps(20)
            + evaluation(3)
            + (steps(10) + evaluation(3) if rank == 2 else steps(24))
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (2,),
        34,
    ),
    "a call left out of the second encoder": Scenario(
        [with_a_second(12, left_out=5 if rank == 2 else 0) + OUT for rank in range(4)],
        ids.UNEVEN_CALLS,
        (2,),
        12,
    ),
    "one training call fewer": Scenario(
        [
            steps(19 if rank == 1 else 20) + evaluation(5) + steps(4)
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (1,),
        20,
    ),
    "the flag differs": Scenario(
        [steps(20)] * 4,
        ids.DIFFERENT_SYNC,
        (3,),
        setups={3: Setup(flag=False)},
    ),
    "sync=local on one": Scenario(
        [steps(20)] * 4, ids.DIFFERENT_SYNC, (1,), setups={1: Setup(sync="local")}
    ),
    "chronic straggler": Scenario(
        [steps(100, pause=0.15 if rank == 2 else 0.1) + OUT for rank in range(4)],
        ids.STRAGGLER,
        (2,),
    ),
    "late once": Scenario(
        four(
            steps(100),
            [Call(pause=26), Gradients(), *steps(50), *OUT],
            [*steps(51), *OUT],
        ),
        ids.LATE,
        (2,),
        101,
    ),
}


def report_on(scenario: Scenario, folder: Path, seed: int = 0) -> Diagnosis:
    return diagnose(
        Folder(
            write(
                folder, scenario.schedules, scenario.setups, scenario.reports, seed=seed
            )
        ).read()
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_has_its_verdict(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    report = report_on(scenario, tmp_path)
    assert report.exit_code == 1 and not report.problems
    first = report.findings[0]
    assert (first.id, first.ranks, first.call, first.phase) == (
        scenario.finding,
        scenario.ranks,
        scenario.call,
        scenario.phase,
    ), report
    assert first.next_step
    # Nothing else is critical, but for what follows from the first.
    others = [
        one
        for one in report.findings[1:]
        if one.severity == CRITICAL and not one.because
    ]
    assert not others, report


def test_a_wait_in_vain_counts_as_waited(tmp_path: Path) -> None:
    ranks = report_on(SCENARIOS["late once"], tmp_path).ranks
    assert (ranks[0].waited or 0.0) >= 10 > (ranks[2].waited or 0.0)


chance = random.Random(3)
HEALTHY: dict[str, Scenario] = {
    "ended in good order": Scenario(
        [steps(60) + evaluation(10) + steps(20) + OUT] * 4, "", ()
    ),
    "lateness is by chance": Scenario(
        [
            [
                *(
                    event
                    for _ in range(52)
                    for event in steps(1, 0.05 + chance.expovariate(20))
                ),
                *OUT,
            ]
            for _ in range(4)
        ],
        "",
        (),
    ),
    "one after the other is late": Scenario(
        [
            steps(26, 0.25 if rank == 0 else 0.1)
            + steps(26, 0.25 if rank == 1 else 0.1)
            + OUT
            for rank in range(4)
        ],
        "",
        (),
    ),
    "default DDP": Scenario(
        [[DdpForward(), Call(pause=0.0), Gradients()] * 60 + OUT] * 4, "", ()
    ),
    "lengths differ": Scenario(
        [steps(60, length=500 + 100 * rank) + OUT for rank in range(4)], "", ()
    ),
    "everything grows": Scenario([steps(9) + steps(9, length=9000) + OUT] * 4, "", ()),
    "one is late, in time": Scenario(
        four(
            steps(60),
            [Call(pause=9.5), Gradients(), *steps(60), *OUT],
            [*steps(61), *OUT],
        ),
        "",
        (),
    ),
    "the last one is never the same": Scenario(
        [
            [
                event
                for step in range(120)
                for event in steps(1, pause=0.2 if step % 4 == rank else 0.1)
            ]
            + OUT
            for rank in range(4)
        ],
        "",
        (),
    ),
    "a lag of no account": Scenario(
        [steps(120, pause=1.004 if rank == 1 else 1.0) + OUT for rank in range(4)],
        "",
        (),
    ),
    "waiting that is no part of the time": Scenario(
        [steps(120, pause=1.02 if rank == 1 else 1.0) + OUT for rank in range(4)],
        "",
        (),
    ),
    "a lag of milliseconds": Scenario(
        [steps(120, pause=0.013 if rank == 1 else 0.01) + OUT for rank in range(4)],
        "",
        (),
    ),
    "a straggler that has got well": Scenario(
        [
            steps(70, pause=0.3 if rank == 1 else 0.1) + steps(50) + OUT
            for rank in range(4)
        ],
        "",
        (),
    ),
    "no rank syncs": Scenario(
        [steps(50) + OUT] * 4,
        "",
        (),
        setups={rank: Setup(flag=False) for rank in range(4)},
    ),
    "evaluation only": Scenario([evaluation(80) + OUT] * 4, "", ()),
    "one rank": Scenario([steps(50) + OUT], "", ()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(name: str, tmp_path: Path) -> None:
    report = report_on(HEALTHY[name], tmp_path)
    assert report.findings == () and report.exit_code == 0
    assert (
        report.verdict.startswith("Nothing found")
        and "ended in good order" in report.verdict
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_that_is_killed_at_any_moment_accuses_nobody(
    name: str, tmp_path: Path
) -> None:
    """SIGKILL of all ranks at one moment; what a rank recorded in the last milliseconds may be
    lost, or half a line.
    """
    draw = random.Random(name)
    job = HEALTHY[name]
    write(tmp_path / "whole", job.schedules, job.setups)
    ranks = []
    for file in sorted((tmp_path / "whole").iterdir()):
        lines = file.read_bytes().splitlines(True)
        found = [json.loads(line) for line in lines]
        # All leave the length sync of call 1 at once. Without one, the clocks are as far apart as
        # the ranks' starts.
        began = next(one["t"] for one in found if one["k"] == "sync")
        ranks.append((file.name, lines, [one.get("t", -1e9) - began for one in found]))
    first, last = (
        edge(time for _, _, times in ranks for time in times[1:]) for edge in (min, max)
    )
    verdicts = set()
    for number in range(CUTS):
        # Also where one or all have just begun, or are about to end.
        killed_at = (
            draw.uniform(first, last)
            if number % 4
            else draw.choice((first, last)) + draw.uniform(-0.3, 0.3)
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        for file_name_, lines, times in ranks:
            count = bisect.bisect(times, killed_at - draw.choice((0, 0.001, 0.01)))
            half = (
                lines[count][: draw.randrange(40)]
                if count < len(lines) and draw.random() < 0.2
                else b""
            )
            if count:
                (folder / file_name_).write_bytes(b"".join(lines[:count]) + half)
        report = diagnose(Folder(folder).read())
        accused = [
            one
            for one in report.findings
            if one.severity == CRITICAL or (one.ranks and one.id != ids.UNTRACED)
        ]
        truths = {
            ids.NOT_ENOUGH,
            ids.STRAGGLER if name == "a straggler that has got well" else "",
        }
        assert not [one for one in accused if one.id not in truths], report
        verdicts |= {one.id for one in report.findings[:1]}
    assert ids.STOPPED_AT_ONCE in verdicts


CUTS = 90  # of each healthy job


NOT_TOGETHER = Exit(
    "StopTogetherError: loader: the ranks cannot end together any more: the connection"
    " was lost"
)


@pytest.mark.parametrize(
    ("of_rank", "finding"),
    [
        # By Ctrl-C: a record tells how it went, so it was not "killed without an end".
        ([[Exit("KeyboardInterrupt: ")], *[[Call(), CLOSED]] * 3], ids.STOPPED_AT_ONCE),
        # By connections that were closed on all ranks, at different calls: no good order, and no
        # uneven calls.
        ([[Call(), CLOSED], *[[CLOSED]] * 3], ids.STOPPED_AT_ONCE),
        (
            [[Exit("KeyboardInterrupt: ")], *[[Call(), NOT_TOGETHER]] * 3],
            ids.STOPPED_AT_ONCE,
        ),
    ],
)
@pytest.mark.parametrize("reports", [False, True])
def test_ranks_that_were_ended_from_outside_are_not_accused(
    of_rank: list[list[Event]], finding: str, reports: bool, tmp_path: Path
) -> None:
    write(tmp_path, [steps(9) + last for last in of_rank], reports=reports)
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks, report.exit_code) == (
        finding,
        (),
        1,
    ), report
    assert "killed or crashed" not in str(report)


BY_SIGNAL = Call(
    raises="SignalException"
)  # as torchrun's agent has it raised in a forked rank


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize(
    "of_rank",
    [
        [[Killed()], [Call(), CLOSED], [Call(), CLOSED]],
        [[Killed()], [BY_SIGNAL], [Call(), CLOSED]],
        [[Call(stuck="layers", dies=True)], [Call(), CLOSED], [Call(), CLOSED]],
    ],
)
def test_who_has_no_end_was_killed_where_the_others_connections_closed(
    of_rank: list[list[Event]], reports: bool, tmp_path: Path
) -> None:
    write(tmp_path, [steps(9) + last for last in of_rank], reports=reports)
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.KILLED,
        (0,),
    ), report
    assert report.findings[0].severity == CRITICAL
    assert not [
        one
        for one in report.findings[1:]
        if one.severity == CRITICAL and not one.because
    ], report


def test_the_last_records_of_a_killed_rank_may_not_have_been_written(
    tmp_path: Path,
) -> None:
    last = [[Call(stuck="layers", dies=True)], [Call(), CLOSED], [Call(), CLOSED]]
    write(tmp_path, [steps(9) + of_rank for of_rank in last], reports=False)
    file = sorted(tmp_path.iterdir())[0]
    file.write_bytes(
        b"".join(
            line for line in file.read_bytes().splitlines(True) if b'"n":10' not in line
        )
    )
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.KILLED,
        (0,),
    ), report


def test_of_several_ranks_without_an_end_none_is_accused_unless_their_whole_host_is_gone(
    tmp_path: Path,
) -> None:
    """A launcher ends the ranks that are left by SIGTERM, which leaves nothing."""
    for gone, accused in (((0, 2), ()), ((4, 5, 6, 7), (4, 5, 6, 7))):
        folder = tmp_path / str(gone)
        schedules = [
            steps(9) + ([Killed()] if rank in gone else [Call(), CLOSED])
            for rank in range(8)
        ]
        report = diagnose(Folder(write(folder, schedules, reports=False)).read())
        assert report.findings[0].ranks == accused, report
        if not accused:
            assert "ranks 0, 2 have no end" in report.verdict


def test_who_ended_early_comes_before_who_has_no_end(tmp_path: Path) -> None:
    """An exception that Hydra swallows ends one rank without a word; SIGTERM reaches others in
    their teardown.
    """
    schedules = [
        steps(9) + last for last in ([*OUT], [Call(), CLOSED], [Call()], [Call()])
    ]
    report = diagnose(Folder(write(tmp_path, schedules, reports=False)).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.ENDED,
        (0,),
    ), report


def test_the_table_tells_for_whom_ranks_waited_only_where_they_did(
    tmp_path: Path,
) -> None:
    """Of a healthy job the little waiting there is would be "for rank 0"."""
    for name, scenario in HEALTHY.items():
        if name in ("default DDP", "lengths differ", "a lag of no account"):
            ranks = report_on(scenario, tmp_path / name).ranks
            assert {(one.caused, one.lag) for one in ranks} == {(None, None)}, name
    assert report_on(SCENARIOS["chronic straggler"], tmp_path / "late").ranks[
        2
    ].caused == pytest.approx(1, abs=0.05)


def test_a_job_that_ended_before_its_first_call_or_of_which_a_file_is_cut_is_no_good_run(
    tmp_path: Path,
) -> None:
    write(tmp_path / "first", [[Call(), CLOSED]] * 2)
    for file in (tmp_path / "first").iterdir():
        lines = file.read_bytes().splitlines(True)
        kinds = (b'"k":"header"', b'"k":"end"')
        file.write_bytes(
            b"".join(line for line in lines if any(kind in line for kind in kinds))
        )
    report = diagnose(Folder(tmp_path / "first").read())
    assert (report.exit_code, report.findings[0].id) == (1, ids.WAITED_IN_VAIN), report
    file = sorted(
        write(tmp_path / "cut", HEALTHY["ended in good order"].schedules).iterdir()
    )[1]
    file.write_bytes(file.read_bytes()[:5000])
    report = diagnose(Folder(tmp_path / "cut").read())
    assert [one.id for one in report.findings] == [ids.NOT_ENOUGH], (
        report
    )  # not: rank 1 stopped at call 90


def test_a_good_run_says_what_the_length_sync_has_done(tmp_path: Path) -> None:
    report = report_on(
        Scenario(
            [steps(60, pause=0.102 if rank == 2 else 0.1) + OUT for rank in range(4)],
            "",
            (),
        ),
        tmp_path,
    )
    assert "60 calls, 0 fallbacks" in report.verdict
    cost = float(report.verdict.partition("cost this run ")[2].partition("%")[0])
    assert cost == pytest.approx(
        100 * 0.75 * 0.0025 / 0.109, rel=0.3
    )  # 3 of 4 wait for 2 ms and the round's latency
    late = four(steps(9), [Call(pause=26), *steps(3), *OUT], [*steps(4), *OUT])
    report = report_on(Scenario(late, "", ()), tmp_path / "late")
    outcomes = "".join(file.read_text() for file in (tmp_path / "late").iterdir())
    fallbacks = sum(outcomes.count(f'"outcome":"{outcome}"') for outcome in FALLBACKS)
    assert f", {fallbacks} fallbacks" in report.summary[0] and fallbacks > 2
    assert "longest wait 10.00 s" in report.summary[0]


FALLBACKS = (records.TIMEOUT, records.UNWAITED, records.ENDED)


def test_a_skipped_call_is_told_by_its_number(tmp_path: Path) -> None:
    """Rank 2 leaves its 7th call out, and makes no 12th: nothing but the length sync holds the
    others back.
    """
    calls = (
        [Call(pause=20)] * 12
    )  # where they are in step again before the end, nothing tells which call it was
    report = report_on(
        Scenario(
            four(calls[:6], [Call(pause=40), *calls[8:], *OUT], [*calls[6:], *OUT]),
            "",
            (),
        ),
        tmp_path,
    )
    first = report.findings[0]
    assert (first.id, first.ranks, first.call) == (ids.ENDED, (2,), 7)
    assert "behind since call 7" in first.text


def test_a_rank_that_is_late_in_evaluation_does_not_make_fewer_calls(
    tmp_path: Path,
) -> None:
    late = [*evaluation(2), Call(training=False, pause=15), *evaluation(7)]
    scenario = Scenario(
        four(steps(20), [*late, *steps(30), *OUT], [*evaluation(10), *steps(30), *OUT]),
        "",
        (),
    )
    assert {one.id for one in report_on(scenario, tmp_path).findings} == {ids.LATE}


def test_the_age_of_a_ranks_last_record_is_told_without_the_hosts_clocks(
    tmp_path: Path,
) -> None:
    """The clocks are hours apart, and the traces began half a minute apart; the others gave up
    after 10 s.
    """
    for seed in range(5):
        schedules = SCENARIOS["stuck before the encoder"].schedules
        report = report_on(
            Scenario(schedules, "", (), reports=False), tmp_path / str(seed), seed
        )
        behind = [one.behind for one in report.ranks]
        assert behind[5] == pytest.approx(10.2, abs=0.2)
        assert all(
            one is not None and one < 0.2
            for rank, one in enumerate(behind)
            if rank != 5
        )


def test_an_exception_explains_the_others_timeouts(tmp_path: Path) -> None:
    scenario = Scenario(
        four(
            steps(30),
            [Call(raises="RuntimeError"), Gradients()],
            [Call(), Call(pause=0.2), Gradients()],
        ),
        ids.EXCEPTION,
        (2,),
    )
    report = report_on(scenario, tmp_path)
    assert report.findings[0].id == ids.EXCEPTION
    assert [one.because for one in report.findings[1:]] == [ids.EXCEPTION] * len(
        report.findings[1:]
    )


def test_all_sync_errors_at_once_blame_no_rank(tmp_path: Path) -> None:
    write(tmp_path, [steps(30)] * 3)
    for file in tmp_path.iterdir():
        file.write_bytes(
            file.read_bytes().replace(b'"outcome":"came"', b'"outcome":"ended"')
        )
    report = diagnose(Folder(tmp_path).read())
    assert ids.SYNC_ENDED in {one.id for one in report.findings}
    assert ids.KILLED not in {one.id for one in report.findings}


# A running job.


def test_a_job_that_runs_is_not_a_job_that_hangs(tmp_path: Path) -> None:
    """Its files end in the middle of a step; between two looks they grow."""
    write(tmp_path, four(steps(70), [], [Call(), Gradients()]), reports=False)
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for number, (file, content) in enumerate(whole.items()):
        file.write_bytes(content[: len(content) // 2 + 60 * number])

    def later(_: float) -> None:
        for number, (file, content) in enumerate(whole.items()):
            file.write_bytes(content[: len(content) * 2 // 3 + 60 * number])
            os.utime(file, (time.time() - 300,) * 2)

    job, report = once(tmp_path, later)
    assert job.moving and report.findings == ()
    assert "running" in report.verdict
    assert report.runs and all(
        300 <= (one.ago or 0.0) < 600 for one in report.ranks
    )  # until now
    for file, content in whole.items():
        file.write_bytes(content)
    job, report = once(tmp_path, lambda _: None)
    assert not job.moving and report.findings[0].id == ids.MISSING_RANK
    assert (
        not report.runs and min(one.ago or 0.0 for one in report.ranks) == 0.0
    )  # until the newest record of all


def test_in_a_job_that_runs_a_rank_that_the_others_gave_up_on_is_told(
    tmp_path: Path,
) -> None:
    write(tmp_path, four(steps(20), evaluation(3), evaluation(40)))
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for file, content in whole.items():
        file.write_bytes(content[:-300])

    def later(_: float) -> None:
        for file, content in whole.items():
            file.write_bytes(content)

    job, report = once(tmp_path, later)
    assert job.moving
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.MISSING_RANK, (2,))


# What else may be in the folder.


def test_other_files_are_named_and_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, SCENARIOS["stuck before the encoder"].schedules)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 999)
    (tmp_path / "evil\x1b[31m\nname.jsonl").write_text("{}\n")
    (tmp_path / "rank-00003.20261121T183311.7.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    other = records.encode(header(1, 8, 1e9, Setup())).replace(
        b'"format":2', b'"format":1'
    )
    (tmp_path / "other.jsonl").write_bytes(other)
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks, len(report.findings)) == (
        ids.MISSING_RANK,
        (5,),
        1,
    )
    told = "\n".join(report.problems)
    for said in (
        "notes.txt: not a trace",
        "empty.jsonl: empty",
        "binary.jsonl: does not begin with a trace's header",
        "gz: compressed",
        "folder.jsonl: a folder",
        "pipe.jsonl: not a file",
        "other.jsonl: format 1",
        "gone.jsonl: cannot be read",
        "evil?[31m?name.jsonl",
    ):
        assert said in told
    assert "\x1b" not in told


def test_lines_that_are_no_records_are_counted_and_bounded(tmp_path: Path) -> None:
    write(tmp_path, [steps(30) + OUT] * 2)
    odd = [
        b'{"k":"enter","t":1,"e":"E","n":' + b"9" * 5000 + b"}",
        b'{"k":"grow","t":1e999,"e":"E","n":1,"old":1,"new":2}',
        b'{"k":"grow","t":NaN,"e":"E","n":1,"old":1,"new":2}',
        b'{"k":"leave","t":1,"e":"E","n":1,"shape":' + b"[" * 200_000 + b"}",
        b'{"k":"end"}',
        b"\x00" * 4096,
        b'{"k":"leave","t":1,"e":"E","n":1,"shape":['
        + b"1," * (LONGEST_LINE * 2)
        + b"1]}",
        b"null",
        b'"\xff\xfe"',
    ]
    file = sorted(tmp_path.iterdir())[0]
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join(lines[:40] + odd + lines[40:]))
    folder = Folder(tmp_path)
    report = diagnose(folder.read())
    (problem,) = report.problems
    assert f"{len(odd)} lines are no records" in problem
    assert report.findings == ()


def test_what_is_kept_of_a_file_is_bounded() -> None:
    trace = RankTrace(header(0, 2, 1e9, Setup()))
    raised = records.Raised(1.0, "", 0, "E", "m" * 6000, "t" * 6000)
    missing = records.Stalled(1.0, "ConformerEncoder", 1, list(range(6000)), [], [])
    for _ in range(10):
        trace.take(
            decode(b"".join(records.encode(one) for one in (raised, missing) * 50))
        )
    kept = sum(len(one.message) + len(one.traceback) for one in trace.failed) + sum(
        len(one.ranks) for one in trace.missing
    )
    assert kept < 4_000_000
    calls = [
        records.Enter(1.0, "E" * 5000 + str(e), 1, True, [], "", "")
        for e in range(1000)
    ]
    trace.take(decode(b"".join(map(records.encode, calls))))
    assert len(trace.tracks) == 64 and all(
        len(track.name) < 5000 for track in trace.tracks.values()
    )


def test_the_latest_launch_is_diagnosed_and_earlier_ones_are_named(
    tmp_path: Path,
) -> None:
    write(tmp_path, [steps(9)] * 4, launched=1.7e9, seed=3)
    write(
        tmp_path,
        SCENARIOS["ended early"].schedules,
        {r: Setup(restart=1) for r in range(4)},
        launched=1.7e9 + 600,
        seed=3,
    )
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.ENDED, (2,))
    why, *earlier = report.earlier
    assert "the launch with restart 1, begun last by torchrun's restart count" in why
    assert len(earlier) == 4 and all("restart 0" in line for line in earlier)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4)])
def test_an_elastic_job_may_have_another_size_and_other_hosts_after_a_restart(
    before: int, after: int, tmp_path: Path
) -> None:
    """Their clocks are hours apart, and each rank is on another one than before."""
    for seed in range(3):
        folder = tmp_path / str(seed)
        died = [
            steps(9) + ([Killed()] if rank == 2 else [Call(), CLOSED])
            for rank in range(before)
        ]
        write(
            folder,
            died,
            {rank: Setup(restart=0) for rank in range(before)},
            launched=1.7e9,
            seed=seed,
        )
        setups = {rank: Setup(restart=1) for rank in range(after)}
        write(
            folder,
            [steps(20) + OUT] * after,
            setups,
            launched=1.7e9 + 600,
            seed=seed + 9,
        )
        report = diagnose(Folder(folder).read())
        assert (report.findings, report.exit_code, report.world_size) == ((), 0, after)
        assert len(report.earlier) == before + 1


def test_a_rank_whose_trace_was_stopped_did_not_make_fewer_calls(
    tmp_path: Path,
) -> None:
    file = sorted(write(tmp_path, [steps(40) + OUT] * 4).iterdir())[2]
    lines = file.read_bytes().splitlines(True)[:60]
    stopped = records.End(json.loads(lines[-1])["t"], "apply() with another trace")
    file.write_bytes(b"".join([*lines, records.encode(stopped)]))
    assert {one.id for one in diagnose(Folder(tmp_path).read()).findings} == {
        ids.NOT_ENOUGH
    }


def test_two_jobs_in_one_folder_stay_two(tmp_path: Path) -> None:
    """They ran at the same time, each rank of the one a little before or after that of the other."""
    for job, scenario in (("one", "ended early"), ("other", "exception")):
        setups = {rank: Setup(job=job) for rank in range(4)}
        write(
            tmp_path,
            SCENARIOS[scenario].schedules,
            setups,
            launched=1.7e9,
            seed=len(job),
        )
    for file in tmp_path.iterdir():  # rank 0 of the one began last of all
        lines = file.read_bytes().splitlines(True)
        first = json.loads(lines[0])
        if (first["job"], first["rank"]) == ("one", 0):
            lines[0] = lines[0].replace(
                str(first["started"]).encode(), b"1800000000.0", 1
            )
            file.write_bytes(b"".join(lines))
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.ENDED, (2,))
    assert "of job one" in report.earlier[0]
    assert len(report.earlier) == 5 and all(
        "of another job, other" in line for line in report.earlier[1:]
    )


def test_ranks_that_come_last_together_are_not_called_stragglers(
    tmp_path: Path,
) -> None:
    """DDP on Gloo has rank 0 wait for a late rank 1 in its broadcast, before the encoder."""
    late = [steps(100, pause=0.22 if rank < 2 else 0.1) + OUT for rank in range(4)]
    report = report_on(Scenario(late, "", ()), tmp_path)
    assert report.findings == ()
    assert all((one.lag or 0.0) > 0.1 for one in report.ranks[:2])


@pytest.mark.parametrize("reports", [False, True])
def test_of_a_rank_that_went_on_alone_nobody_else_is_accused(
    reports: bool, tmp_path: Path
) -> None:
    """It left a backward out. All wait by the stall reports; without them rather one went on than
    three are held up.
    """
    ahead = [Call(), Call(), Gradients(), Collective("its own")]
    others = [Call(), Gradients(), Collective("theirs")]
    last = [[Call(), Call()], [Call()]] if not reports else [ahead, others]
    first = report_on(
        Scenario(four(steps(9), *last), "", (), reports=reports), tmp_path
    ).findings[0]
    assert (first.id, first.ranks, first.call) == (ids.SKIPPED, (), 11), first
    assert (
        "Rank 2 is at training call 11 of ConformerEncoder, ranks 0-1, 3 at call 10"
        in first.text
    )


def test_a_rank_that_did_not_start_again_is_not_diagnosed_by_its_earlier_start(
    tmp_path: Path,
) -> None:
    # Told by torchrun's count; and, where that is the same, by the host's own clock.
    for restart, later, seed in [(0, 90_000, 3), *((1, 60, seed) for seed in range(6))]:
        folder = tmp_path / f"{restart}-{seed}"
        setups = {rank: Setup(restart=restart) for rank in range(4)}
        write(folder, [steps(9)] * 4, launched=1.7e9, seed=seed)
        write(
            folder,
            [steps(9)] * 4,
            {**setups, 2: Setup(patched=False)},
            launched=1.7e9 + later,
            seed=seed,
        )
        report = diagnose(Folder(folder).read())
        assert (report.findings[0].id, report.findings[0].ranks) == (
            ids.MISSING_RANK,
            (2,),
        )
        assert len(report.earlier) == 5


def test_where_stall_reports_name_who_is_missing_nobody_else_is_blamed(
    tmp_path: Path,
) -> None:
    """A file that ends early, but has the last round that came, is otherwise that of a rank that is
    stuck, too.
    """
    for reports, blamed in ((True, (2,)), (False, (0, 2))):
        folder = write(
            tmp_path / str(reports), four(steps(70), [], steps(1)), reports=reports
        )
        file = sorted(folder.iterdir())[0]
        lines = file.read_bytes().splitlines(True)
        file.write_bytes(b"".join(line for line in lines if b'"n":71' not in line))
        report = diagnose(Folder(folder).read())
        assert (report.findings[0].id, report.findings[0].ranks) == (
            ids.MISSING_RANK,
            blamed,
        )


def test_a_stall_report_of_an_earlier_stall_says_nothing_of_this_one(
    tmp_path: Path,
) -> None:
    late: list[Event] = [Call(pause=26), Gradients()]
    schedules = [
        steps(9)
        + (late if rank == 1 else steps(1))
        + steps(110)
        + ([] if rank in (1, 2) else steps(1))
        for rank in range(4)
    ]
    write(tmp_path, schedules)
    for file in tmp_path.iterdir():  # of the present stall there is no report yet
        lines = file.read_bytes().splitlines(True)
        kept = [
            line for line in lines if not (b'"stalled"' in line and b'"n":121' in line)
        ]
        assert len(lines) - len(kept) <= 1
        file.write_bytes(b"".join(kept))
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.MISSING_RANK,
        (1, 2),
    )


def test_traces_that_contradict_each_other_are_no_verdict(tmp_path: Path) -> None:
    """Every rank gave up the round that every rank came to: one file holds what its rank did not
    do.
    """
    write(tmp_path, four(steps(70), [], steps(1)), reports=False)
    files = sorted(tmp_path.iterdir())
    theirs = [
        json.loads(line)
        for line in files[0].read_bytes().splitlines()
        if b'"n":71' in line
    ]
    mine = files[2].read_bytes()
    last = json.loads(mine.splitlines()[-1])["t"]
    made_up = [json.dumps({**one, "t": last}).encode() for one in theirs]
    files[2].write_bytes(mine + b"\n".join(made_up) + b"\n")
    report = diagnose(Folder(tmp_path).read())
    assert [one.id for one in report.findings] == [ids.NOT_ENOUGH]
    assert "contradict each other" in report.verdict


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"n":35,"training"', b'"n":95,"training"', "records do not follow"),
        (
            b'"outcome":"came","round":35',
            b'"outcome":"came","round":95',
            "3 records do not follow",
        ),
        (b'"k":"leave"', b'"k":"leave","e"', "lines are no records"),
    ],
)
def test_one_record_that_is_wrong_does_not_spoil_those_after_it(
    old: bytes, new: bytes, said: str, tmp_path: Path
) -> None:
    write(tmp_path, four(steps(70), [], steps(1)))
    file = sorted(tmp_path.iterdir())[0]
    content = file.read_bytes()
    at = content.index(old, content.index(b'"n":34,"training"'))
    file.write_bytes(content[:at] + new + content[at + len(old) :])
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.MISSING_RANK, (2,))
    assert report.ranks[0].state == "out of call 71"
    assert said in report.problems[0]


def test_a_file_with_another_files_lines_in_it_blames_nobody(tmp_path: Path) -> None:
    write(tmp_path, four(steps(30), [Call(raises="ValueError"), *OUT], steps(1)))
    files = sorted(tmp_path.iterdir())
    mine, theirs = (
        files[0].read_bytes().splitlines(True),
        files[2].read_bytes().splitlines(True),
    )
    files[0].write_bytes(b"".join([*mine[:-1], *theirs]))
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.EXCEPTION, (2,))
    assert report.ranks[0].state == "not known"
    assert "of another process" in report.problems[0]


def test_a_line_that_is_lost_is_noticed(tmp_path: Path) -> None:
    for number, kind in enumerate(("enter", "sync", "leave")):
        folder = write(tmp_path / kind, [steps(30) + OUT] * 2)
        file = sorted(folder.iterdir())[0]
        lines = file.read_bytes().splitlines(True)
        lost = [line for line in lines if f'"k":"{kind}"'.encode() in line][9 + number]
        file.write_bytes(b"".join(line for line in lines if line != lost))
        report = diagnose(Folder(folder).read())
        assert "do not follow" in report.problems[0], kind
        assert report.findings == ()


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, [steps(3)] * 2)
    file = sorted(tmp_path.iterdir())[0]
    with file.open("ab") as more:
        more.write(b"x" * (8 * LONGEST_LINE))
    start = Start(file, RankTrace(header(0, 2, 1e9, Setup())), 0)
    start.read_on()
    assert (
        start.offset == file.stat().st_size and len(start.pending) <= 2 * LONGEST_LINE
    )


def test_a_file_that_lacks_a_round_that_came_blames_nobody(tmp_path: Path) -> None:
    """By itself it is the file of a rank that stopped after call 35; but all ranks came to 35
    rounds more.
    """
    write(tmp_path, four(steps(70), [], steps(1)), reports=False)
    file = sorted(tmp_path.iterdir())[0]
    lines = file.read_bytes().splitlines(True)
    file.write_bytes(b"".join(lines[: len(lines) // 2]))
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.MISSING_RANK, (2,))
    assert report.ranks[0].state == "not known"
    sorted(tmp_path.iterdir())[2].unlink()  # the rank that is to blame
    report = diagnose(Folder(tmp_path).read())
    assert [one.id for one in report.findings[:2]] == [ids.UNTRACED, ids.NOT_ENOUGH]
    assert "it came to round 70, " in report.findings[1].evidence[0]


def test_a_trace_that_ends_at_its_size_does_not_say_that_its_rank_is_stuck(
    tmp_path: Path,
) -> None:
    """Whether one file is full, or all are, each at a call of its own."""
    for name, full in (("one", (0,)), ("all", (0, 1, 2))):
        folder = write(tmp_path / name, [steps(70) + OUT] * 3, reports=False)
        for rank, file in enumerate(sorted(folder.iterdir())):
            lines = file.read_bytes().splitlines(True)[: 150 - 10 * rank]
            end = records.End(json.loads(lines[-1])["t"], records.AT_ITS_SIZE)
            if rank in full:
                file.write_bytes(b"".join([*lines, records.encode(end)]))
        report = diagnose(Folder(folder).read())
        assert {one.id for one in report.findings} == {ids.NOT_ENOUGH}, report
        assert f"its trace was stopped: {records.AT_ITS_SIZE}" in str(
            report.findings[0].evidence
        )


def test_calls_of_which_only_the_sync_is_recorded_are_compared_too(
    tmp_path: Path,
) -> None:
    """As a compiled encoder's are."""
    write(tmp_path, four(steps(70), [], steps(1)))
    for file in tmp_path.iterdir():
        kept = [
            line
            for line in file.read_bytes().splitlines(True)
            if json.loads(line)["k"] in _COMPILED
        ]
        file.write_bytes(b"".join(kept))
    report = diagnose(Folder(tmp_path).read())
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.MISSING_RANK,
        (2,),
    ) and not report.problems


_COMPILED = ("header", "sync", "stalled")


def test_a_new_process_group_begins_with_round_1_again(tmp_path: Path) -> None:
    def lines(rank: int) -> Iterator[records.Record]:
        yield header(rank, 2, 1e9, Setup())
        for n in range(1, 41):
            number, t = (n - 1) % 20 + 1, n + 0.5 * rank
            yield records.Enter(t, "E", n, True, [1, 80, 9], "float32", "cpu")
            yield records.Sync(t + 0.1, "E", n, records.CAME, number, 0.1, 9, 9)
            yield records.Leave(t + 0.2, "E", n, [1])
        yield records.End(60.0)

    for rank in range(2):
        (tmp_path / file_name(rank, 1e9)).write_bytes(
            b"".join(map(records.encode, lines(rank)))
        )
    report = diagnose(Folder(tmp_path).read())
    assert report.findings == () and report.problems == ()


# The command.


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "nemo_patches", "diagnose", *arguments)


def test_the_command_prints_plain_text_and_gives_the_exit_code(tmp_path: Path) -> None:
    write(tmp_path / "hangs", SCENARIOS["stuck before the encoder"].schedules)
    write(tmp_path / "well", HEALTHY["ended in good order"].schedules)
    done = run(str(tmp_path / "hangs"))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("Rank 5: ")
    assert "\x1b" not in done.stdout and "--pid 4005" in done.stdout
    assert run(str(tmp_path / "well")).returncode == 0
    found = run(str(tmp_path / "hangs"), "--json")
    content = json.loads(found.stdout)
    assert found.returncode == content["exit_code"] == 1
    assert (content["format"], set(content)) == (command.JSON_FORMAT, JSON_KEYS)
    nowhere = run(str(tmp_path / "nowhere"), "--json")
    assert json.loads(nowhere.stdout) == {
        "format": command.JSON_FORMAT,
        "error": nowhere.stderr.partition(": ")[2].strip(),
        "exit_code": 2,
    }
    assert content["findings"][0]["id"] == ids.MISSING_RANK and content["findings"][0][
        "ranks"
    ] == [5]


JSON_KEYS = {
    "format",
    "folder",
    "world_size",
    "moving",
    "verdict",
    "next_step",
    "findings",
    "ranks",
    "problems",
    "earlier",
    "summary",
    "runs",
    "exit_code",
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "No such file or directory"),
        ((".",), "it is empty"),
        (("file.jsonl", "--plot", "x.png"), "no folder of traces"),
        (("file.jsonl",), "give the folder that it is in"),
    ],
)
def test_what_cannot_be_read_gets_exit_code_2_and_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.jsonl").write_bytes(records.encode(header(0, 2, 1e9, Setup())))
    where, *rest = arguments
    done = run(str(tmp_path / ("folder" if where == "." else where)), *rest)
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(
        "nemo-patches diagnose: "
    )


def test_a_trace_without_a_call_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / file_name(0, 1e9)).write_bytes(
        records.encode(header(0, 1, 1e9, Setup()))
    )
    report = diagnose(Folder(tmp_path).read())
    assert [one.id for one in report.findings] == [
        ids.NOT_ENOUGH
    ] and report.exit_code == 2
    with pytest.raises(UnreadableError, match="no trace file"):
        Folder(tmp_path / "..").read()


def test_what_a_file_says_is_printed_safely(tmp_path: Path) -> None:
    evil = "\x1b]0;x\x07\n[red]RED[/red]"
    write(tmp_path, four(steps(9), [Call(raises=evil), *OUT], steps(2)))
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert (
        "\x1b" not in done.stdout
        and "\x07" not in done.stdout
        and "[red]RED[/red]" in done.stdout
    )
    assert "\x1b" not in json.loads(run(str(tmp_path), "--json").stdout)["verdict"]


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, HEALTHY["ended in good order"].schedules)
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['nemo'] = None\n"
        f"sys.argv[1:] = ['diagnose', {str(tmp_path)!r}]\n"
        "from nemo_patches.cli import main; main()"
    )
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_that_all_report_each_other_missing_beside_more_without_a_trace(
    tmp_path: Path,
) -> None:
    """The call that most of the missing stand at is then one of a rank without a trace."""
    untraced = {rank: Setup(traced=False) for rank in (2, 3, 4)}
    write(tmp_path, [steps(5)] * 5, setups=untraced, reports=False)
    for rank, other in ((0, 1), (1, 0)):
        (file,) = tmp_path.glob(f"rank-0000{rank}.*")
        missing = [other, 2, 3, 4]
        last = json.loads(file.read_bytes().splitlines()[-1])["t"]
        report = records.Stalled(
            last + 1, "ConformerEncoder", 0, missing, [ELSEWHERE] * 4, [""] * 4
        )
        file.write_bytes(file.read_bytes() + records.encode(report))
    report_ = diagnose(Folder(tmp_path).read())
    first = report_.findings[0]
    assert first.ranks == (2, 3, 4) and "which ranks 0-1 went through" in first.text, (
        first
    )
    assert (
        "not entered" not in first.text
    )  # they may have made that call: they have no trace


def test_who_has_gone_beside_a_rank_that_raised_is_not_accused(tmp_path: Path) -> None:
    """The launcher ended it, before it wrote anything. Where who raised is not missing, it may have
    been killed.
    """
    for gone, expected in (
        ([0, 2], {ids.EXCEPTION: (2,)}),
        ([0], {ids.MISSING_RANK: (0,)}),
    ):
        folder = tmp_path / str(len(gone))
        folder.mkdir()
        last = [[Killed()], [Call()], [Exit("ValueError: bad")]]
        setups = {0: Setup(traced=False)}
        write(
            folder,
            [steps(5) + of_rank for of_rank in last],
            setups=setups,
            reports=False,
        )
        (file,) = folder.glob("rank-00001.*")
        at = json.loads(file.read_bytes().splitlines()[-1])["t"]
        report = records.Stalled(
            at + 1, "ConformerEncoder", 0, gone, [SILENT] * 2, [GONE] * 2
        )
        file.write_bytes(file.read_bytes() + records.encode(report))
        found = {
            one.id: one.ranks
            for one in diagnose(Folder(folder).read()).findings
            if one.severity == CRITICAL
        }
        assert found == expected
