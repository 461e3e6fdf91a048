"""Traces as facts: what their reader tells of each rank, and that the judge over it accuses nobody
who waited.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from simulated_job import Away, Call, Event, Exit, Gradients, Killed, evaluation, steps
from simulated_traces import Setup, write

from nemo_patches.judging.judge import Seat
from nemo_patches.tools.diagnose import fates, reading
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.facts import Evidence, Fate, Member, Motion, Place
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis, Finding
from nemo_patches.tools.diagnose.folder import Folder
from nemo_patches.tools.diagnose.judge import judge, rule
from nemo_patches.tracing.records import Stalled, encode

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

CLOSED = Exit(
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    " [127.0.0.1]:4711"
)
TIMED_OUT = Exit(
    "DistBackendError: [Rank 0] Watchdog caught collective operation timeout"
)
JOBS = 150


def read(folder: Path) -> tuple[Diagnosis, Evidence]:
    evidence = Evidence()
    return diagnose(Folder(folder).read(), evidence), evidence


def fates_of(evidence: Evidence, own: bool = True) -> dict[int, str]:
    return {
        one.rank: one.value.kind
        for one in evidence.facts
        if isinstance(one.value, Fate) and one.own == own
    }


def test_how_each_rank_ended(tmp_path: Path) -> None:
    last = [
        [Call(), CLOSED],
        [Killed()],
        [Call(), TIMED_OUT],
        [Call(raises="ValueError"), Exit()],
        [Exit()],
    ]
    write(tmp_path, [steps(9) + of_rank for of_rank in last], reports=False)
    _, evidence = read(tmp_path)
    # Of rank 1 none is recorded.
    assert fates_of(evidence) == {
        0: fates.CUT,
        2: fates.WAITED,
        3: fates.RAISED,
        4: fates.ENDED,
    }
    members = [one for one in evidence.facts if isinstance(one.value, Member)]
    assert [one.value.world_size for one in members] == [5] * 5 and members[
        0
    ].value.pid == 4000
    assert members[0].host == "node0"


def test_a_stall_is_told_by_rounds_and_by_hearsay_of_who_is_missing(
    tmp_path: Path,
) -> None:
    write(tmp_path, [steps(9) + ([] if rank == 2 else steps(1)) for rank in range(4)])
    _, evidence = read(tmp_path)
    rounds = {
        (one.value.rank, one.value.number): one.value
        for one in evidence.facts
        if isinstance(one.value, Seat)
    }
    assert set(rounds) == {(0, 9), (0, 10), (1, 9), (1, 10), (2, 9), (3, 9), (3, 10)}
    assert (
        rounds[0, 10].group == "length sync of ConformerEncoder" and rounds[0, 10].done
    )
    hearsay = [one for one in evidence.facts if not one.own]
    assert [
        (one.rank, one.cite)
        for one in hearsay
        if one.value.where.startswith("read_audio")
    ] == [  # type: ignore[union-attr]
        (2, "rank 0's stall report")
    ]
    assert all(
        one.value.still_s > 60
        for one in evidence.facts
        if isinstance(one.value, Motion)
    )  # type: ignore[operator]
    ruling = rule(evidence)
    assert [(one.id, one.ranks) for one in ruling.findings] == [
        (ids.MISSING_RANK, (2,))
    ]
    assert "read_audio" in ruling.findings[0].text


STALL = (
    "no step for 60 s. rank 1 (node0, pid 4001): read (data.py:41) < main"
    " (train.py:80); its data loader's worker 3 (pid 81) has /data/shard_07.tar open;"
    " last batch 5 from a.wav | ranks 0, 2: barrier, in save_best (train.py:99)"
)


def test_a_trace_tells_the_worker_and_the_caller_as_its_stall_report_did(
    tmp_path: Path,
) -> None:
    write(tmp_path, [steps(9) for _ in range(3)], reports=False)
    for file in tmp_path.iterdir():
        if file.name.startswith("rank-00002"):
            where = ["read (data.py:41) < main (train.py:80)"]
            told = Stalled(
                100.0, "", 0, [1], ["elsewhere"], where, text=STALL, waited=True
            )
            file.write_bytes(file.read_bytes() + encode(told))
    _, evidence = read(tmp_path)
    told_of = {
        one.rank: one.value
        for one in evidence.facts
        if isinstance(one.value, Place) and not one.own
    }
    assert (
        told_of[1].worker
        == "its data loader's worker 3 (pid 81) has /data/shard_07.tar open"
    )
    assert told_of[1].details == ("last batch 5 from a.wav",)
    assert told_of[2].seat == "barrier of save_best (train.py:99)"


def test_a_traceback_in_the_log_may_be_the_end_of_a_rank_without_one(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        [
            [*steps(9), Call(), CLOSED],
            [*steps(9), Killed()],
            [*steps(9), Call(), CLOSED],
        ],
    )
    (tmp_path / "train.log").write_text(
        'Traceback (most recent call last):\n  File "/job/data.py", line 41, in'
        " read\nValueError: a.wav is empty\n"
    )
    parts = [
        *reading.read(reading.find([tmp_path])),
        ("traces", reading.of_traces(Folder(tmp_path).read())),
    ]
    first = judge(reading.joined(parts)).findings[0]
    assert (first.id, first.ranks) == (ids.KILLED, (1,))
    assert (
        "Or it ended by ValueError: a.wav is empty in read (data.py:41) [train.log:3]"
        in first.text
    )


def test_a_rank_without_a_trace_may_have_made_the_call_that_others_are_in(
    tmp_path: Path,
) -> None:
    """It is in no round that they wait for: they are behind the length sync of that call."""
    write(tmp_path, [[*steps(7), Call(stuck="layers")] for _ in range(3)])
    for file in tmp_path.iterdir():
        if file.name.startswith("rank-00001"):
            file.unlink()
        else:
            told = Stalled(
                100.0,
                "",
                0,
                [1],
                ["elsewhere"],
                ["read (data.py:41)"],
                [""],
                waited=True,
            )
            file.write_bytes(file.read_bytes() + encode(told))
    _, evidence = read(tmp_path)
    first = rule(evidence).findings[0]
    assert (
        first.ranks == (1,)
        and "read (data.py:41)" in first.text
        and "not entered" not in first.text
    ), first.text


def test_ranks_that_are_at_unlike_calls_show_no_wait(tmp_path: Path) -> None:
    """Killed at once: some have just entered their length sync, one has not."""
    write(
        tmp_path,
        [
            [*steps(9), *([] if rank == 2 else [Call(stuck="length sync")])]
            for rank in range(4)
        ],
        reports=False,
    )
    _, evidence = read(tmp_path)
    assert not [
        one for one in evidence.facts if isinstance(one.value, Seat | Place | Fate)
    ]


def random_job(seed: int) -> tuple[str, int, list[list[Event]], dict[int, Setup]]:
    """What kind of job it is, its odd rank, and what each rank does."""
    draw = random.Random(seed)
    size = draw.randrange(2, 6)
    odd = draw.randrange(size)
    whole = [
        event
        for _ in range(draw.randrange(1, 4))
        for event in draw.choice([steps(draw.randrange(2, 12))] * 2 + [evaluation(3)])
    ]
    ends = draw.choice([[Exit()], [], [CLOSED], [TIMED_OUT]])
    last = [*draw.choice([steps(1), steps(3)]), *ends]
    of_odd, of_others = {
        "good": ([*steps(2), Exit()], [*steps(2), Exit()]),
        "late": ([Call(pause=26), Gradients(), *steps(4), Exit()], [*steps(5), Exit()]),
        "decodes": ([*steps(2), Away(200), Exit()], [*steps(2), Exit()]),
        "away": ([], last),
        "killed": ([Killed()], last),
        "stopped": ([Killed(gone=False)], last),
        "ended": ([Exit()], last),
        "raised": ([Call(raises="ValueError"), Exit()], last),
        "failed": ([Exit("ValueError: no such audio")], last),
        "stuck": ([Call(length=9000, stuck="layers")], last),
        "evaluates more": (
            [*evaluation(4), *steps(5), Exit()],
            [*evaluation(3), *steps(5), Exit()],
        ),
        "evaluates once more": (
            [*steps(4), *evaluation(3), *steps(6), Exit()],
            [*steps(10), Exit()],
        ),
        "left out a backward": ([Call(), *steps(5)], [*steps(6), *ends]),
    }[kind := draw.choice(KINDS)]
    setups = {
        rank: Setup(sync=draw.choice(("bounded", "bounded", "local")))
        for rank in range(1)
    }
    return (
        kind,
        odd,
        [whole + (of_odd if rank == odd else of_others) for rank in range(size)],
        dict.fromkeys(range(size), setups[0]),
    )


WELL = ("good", "late", "decodes")
KINDS = (
    *WELL,
    *("away", "killed", "stopped", "ended", "raised", "failed", "stuck"),
    *("evaluates more", "evaluates once more", "left out a backward"),
)


def accused(findings: tuple[Finding, ...]) -> set[int]:
    of_nobody = (ids.ALL_INSIDE, ids.OUTSIDE, ids.ALL_IN)  # these name all ranks
    return {
        rank
        for one in findings
        if one.severity == CRITICAL and one.id not in of_nobody
        for rank in one.ranks
    }


@pytest.mark.parametrize(
    ("last", "accused_ranks"),
    [([], {2}), ([Call()], set())],
    ids=["behind", "beside them"],
)
def test_an_exception_after_others_timed_out_is_a_cause_if_they_waited_for_that_rank(
    last: list[Event], accused_ranks: set[int], tmp_path: Path
) -> None:
    """Who stood where the others did may have waited with them."""
    late = [*last, Away(99.0), Exit("KeyError: 'audio'")]
    write(
        tmp_path,
        [
            steps(9) + of_rank
            for of_rank in ([Call(), TIMED_OUT], [Call(), TIMED_OUT], late)
        ],
        reports=False,
    )
    report, _ = read(tmp_path)
    assert accused(report.findings) == accused_ranks, report
    assert report.findings[0].id == (
        ids.EXCEPTION if accused_ranks else ids.WAITED_IN_VAIN
    )


@pytest.mark.parametrize("begin", range(0, JOBS, JOBS // 5))
def test_random_jobs_accuse_nobody_but_the_odd_rank(begin: int, tmp_path: Path) -> None:
    named = 0
    for seed in range(begin, begin + JOBS // 5):
        kind, odd, schedules, setups = random_job(seed)
        report, evidence = read(
            write(
                tmp_path / str(seed),
                schedules,
                setups,
                reports=seed % 2 == 0,
                seed=seed,
            )
        )
        for findings in (report.findings, rule(evidence).findings):
            assert accused(findings) <= (set() if kind in WELL else {odd}), (
                seed,
                kind,
                odd,
                findings,
            )
            named += accused(findings) == {odd}
        if kind in WELL:
            assert not [one for one in report.findings if one.severity == CRITICAL], (
                seed,
                kind,
                report,
            )
        made = {
            rank: sum(isinstance(event, Call) and event.training for event in of)
            for rank, of in enumerate(schedules)
        }
        if len(set(made.values())) == 1:
            assert "fewer training calls" not in str(report.findings), (
                seed,
                kind,
                report,
            )
    assert named > JOBS // 5 // 2  # of two verdicts on each job
