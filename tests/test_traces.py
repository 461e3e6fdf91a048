"""Traces of simulated jobs: each rank's last call, its end and its stall reports tell which rank is
behind; a healthy job that is killed or cut, or whose files are damaged, accuses nobody.
"""

from __future__ import annotations

import bisect
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from diagnosing import report_of
from interpreters import python
from simulated_job import (
    Away,
    Call,
    DdpForward,
    Event,
    Exit,
    Gradients,
    Killed,
    evaluation,
    steps,
)
from simulated_traces import Setup, file_name, header, write

from nemo_patches.tools.diagnose import command
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

OUT = [Exit()]
CLOSED = Exit("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
TIMED_OUT = Exit(
    "DistBackendError: [Rank 0] Watchdog caught collective operation timeout"
)


@dataclass(frozen=True)
class Scenario:
    """What each rank does, and the first finding that there must be: its id and ranks."""

    schedules: list[list[Event]]
    finding: str
    ranks: tuple[int, ...]
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


def local(size: int) -> dict[int, Setup]:
    return {rank: Setup(sync="local") for rank in range(size)}


SCENARIOS = {
    "before the encoder": Scenario(
        four(steps(70), [], steps(1), 5, 8), ids.MISSING_RANK, (5,)
    ),
    "before it, no stall reports": Scenario(
        four(steps(70), [], steps(1)), ids.MISSING_RANK, (2,), reports=False
    ),
    "before it, in evaluation": Scenario(
        four(steps(20), evaluation(3), evaluation(10)), ids.MISSING_RANK, (2,)
    ),
    "two before it": Scenario(
        [steps(30) + ([] if rank in (1, 6) else steps(1)) for rank in range(8)],
        ids.MISSING_RANK,
        (1, 6),
    ),
    "before it, after uneven evaluations": Scenario(
        [
            (steps(5) + evaluation(4 + (rank == 0))) * 3
            + steps(9)
            + ([] if rank == 1 else steps(1))
            for rank in range(4)
        ],
        ids.MISSING_RANK,
        (1,),
    ),
    "before it, sync=local": Scenario(
        four(steps(70), [], steps(1)), ids.MISSING_RANK, (2,), local(4)
    ),
    "before it, the others timed out": Scenario(
        four(steps(9), [], [Call(), TIMED_OUT]), ids.MISSING_RANK, (2,), local(4), False
    ),
    "inside the layers": Scenario(
        four(steps(20), [Call(9000, stuck="layers")], [Call(9000), Gradients()]),
        ids.MISSING_RANK,
        (2,),
    ),
    "killed before a call": Scenario(
        four(steps(30), [Killed()], steps(5)), ids.KILLED, (2,)
    ),
    "killed inside a call": Scenario(
        four(steps(30), [Call(stuck="layers", dies=True)], [Call(), CLOSED]),
        ids.KILLED,
        (2,),
    ),
    "killed, no stall reports": Scenario(
        four(steps(30), [Killed()], steps(5)), ids.KILLED, (2,), reports=False
    ),
    "no heartbeat": Scenario(
        four(steps(30), [Killed(gone=False)], steps(5)), ids.SILENT, (2,)
    ),
    "ended early": Scenario(four(steps(30), OUT, steps(5)), ids.ENDED, (2,)),
    "exception": Scenario(
        four(steps(30), [Call(raises="RuntimeError"), *OUT], steps(5)),
        ids.EXCEPTION,
        (2,),
    ),
    "exception on all ranks": Scenario(
        [[*steps(30), Call(raises="ValueError"), *OUT] for _ in range(4)],
        ids.EXCEPTION,
        (0, 1, 2, 3),
    ),
    "not patched": Scenario(
        four(steps(3), [], []), ids.MISSING_RANK, (2,), {2: Setup(patched=False)}
    ),
    "one evaluation call more": Scenario(
        [
            (steps(20) + evaluation(6 if rank == 3 else 5)) * 2 + steps(4) + OUT
            for rank in range(4)
        ],
        ids.UNEVEN_CALLS,
        (),
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
    ),
}


def report_on(scenario: Scenario, folder: Path, seed: int = 0) -> Diagnosis:
    write(folder, scenario.schedules, scenario.setups, scenario.reports, seed=seed)
    return report_of(folder)


def criticals(report: Diagnosis) -> list[ids.Finding]:
    return [one for one in report.findings if one.severity == CRITICAL]


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_has_its_verdict(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    report = report_on(scenario, tmp_path)
    first = report.findings[0]
    assert (first.id, first.ranks) == (scenario.finding, scenario.ranks), report
    assert report.exit_code == 1 and first.next_step
    assert not [one for one in criticals(report) if not one.because][1:], report


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
    assert report.verdict.startswith("Nothing found")


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
        report = report_of(folder)
        assert not criticals(report), report


CUTS = 40  # of each healthy job


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


WELL = ("good", "late", "decodes")
KINDS = (
    *WELL,
    *("away", "killed", "stopped", "ended", "raised", "failed", "stuck"),
    *("evaluates more", "evaluates once more", "left out a backward"),
)


def accused(report: Diagnosis) -> set[int]:
    return {rank for one in criticals(report) for rank in one.ranks}


@pytest.mark.parametrize("begin", range(0, 150, 50))
def test_random_jobs_accuse_nobody_but_the_odd_rank(begin: int, tmp_path: Path) -> None:
    named = 0
    for seed in range(begin, begin + 50):
        kind, odd, schedules, setups = random_job(seed)
        reports = seed % 2 == 0
        folder = write(tmp_path / str(seed), schedules, setups, reports, seed=seed)
        report = report_of(folder)
        expected = set() if kind in WELL else {odd}
        assert accused(report) <= expected, (seed, kind, odd, report)
        named += accused(report) == {odd}
        if kind in WELL:
            assert not criticals(report), (seed, kind, report)
    assert named > 15


@pytest.mark.parametrize(
    "last",
    [
        [[Exit("KeyboardInterrupt: ")], *[[Call(), CLOSED]] * 3],
        [[Call(), CLOSED], *[[CLOSED]] * 3],
    ],
)
@pytest.mark.parametrize("reports", [False, True])
def test_ranks_that_were_ended_from_outside_are_not_accused(
    last: list[list[Event]], reports: bool, tmp_path: Path
) -> None:
    report = report_of(write(tmp_path, [steps(9) + of for of in last], None, reports))
    assert not accused(report) and "killed or crashed" not in str(report), report


def test_of_several_without_an_end_none_is_named(tmp_path: Path) -> None:
    """A launcher ends the ranks that are left by SIGTERM, which leaves nothing."""
    schedules = [
        steps(9) + ([Killed()] if rank in (0, 2) else [Call(), CLOSED])
        for rank in range(8)
    ]
    assert not accused(report_of(write(tmp_path, schedules, reports=False)))


def test_a_trace_tells_the_worker_and_the_caller_as_its_stall_report_did(
    tmp_path: Path,
) -> None:
    write(tmp_path, [steps(9) for _ in range(3)], reports=False)
    text = (
        "no step for 60 s. rank 1 (node0, pid 4001): read (data.py:41) < main"
        " (train.py:80); its data loader's worker 3 (pid 81) has /data/shard_07.tar"
        " open; last batch 5 from a.wav | ranks 0, 2: barrier, in save_best"
        " (train.py:99)"
    )
    (file,) = tmp_path.glob("rank-00002*")
    told = records.Stalled(100.0, "", 0, [], [], [], text=text, waited=True)
    file.write_bytes(file.read_bytes() + records.encode(told))
    first = report_of(tmp_path).findings[0]
    assert first.ranks == (1,)
    assert "worker 3 (pid 81) has /data/shard_07.tar open" in first.text
    assert "barrier of save_best (train.py:99)" in first.text


def test_what_ranks_waited_for_is_no_alarm_once_all_have_ended_in_good_order(
    tmp_path: Path,
) -> None:
    """Rank 0 writes the .nemo, and the others report it meanwhile; then all exit."""
    late: list[Event] = [Call(), Away(200), Gradients(), Exit()]
    of_others = [*steps(1), Exit()]
    write(tmp_path, [steps(9) + (of_others if rank else late) for rank in range(4)])
    text = "no step for 60 s. rank 0: save (x.py:1) | ranks 1-3: a collective"
    for file in sorted(tmp_path.iterdir())[1:]:
        *lines, end = file.read_bytes().splitlines(True)
        at = json.loads(end)["t"] - 100
        told = records.Stalled(at, "", 0, [], [], [], text=text, waited=True)
        file.write_bytes(b"".join([*lines, records.encode(told), end]))
    assert report_of(tmp_path).findings == ()


def test_the_latest_launch_is_judged_and_earlier_ones_are_named(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        write(folder, [steps(9)] * 4, launched=1.7e9, seed=seed)
        scenario = SCENARIOS["ended early"]
        write(folder, scenario.schedules, launched=1.7e9 + 600, seed=seed)
        report = report_of(folder)
        assert (report.findings[0].id, report.findings[0].ranks) == (ids.ENDED, (2,))
        assert len(report.earlier) == 4


def test_a_rank_that_did_not_start_again_is_not_judged_by_its_earlier_start(
    tmp_path: Path,
) -> None:
    for seed in range(6):
        folder = tmp_path / str(seed)
        write(folder, [steps(9)] * 4, launched=1.7e9, seed=seed)
        setups = {2: Setup(patched=False)}
        write(folder, [steps(9)] * 4, setups, launched=1.7e9 + 60, seed=seed)
        report = report_of(folder)
        first = report.findings[0]
        assert (first.id, first.ranks) == (ids.MISSING_RANK, (2,)), report
        assert len(report.earlier) == 4


# Damage: it may take a verdict away, and blames nobody else.


def without_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(True)
    del lines[draw.randrange(1, len(lines))]
    return b"".join(lines)


def cut_short(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def changed(data: bytes, draw: random.Random) -> bytes:
    bytes_ = bytearray(data)
    for _ in range(5):
        bytes_[draw.randrange(len(bytes_))] = draw.randrange(256)
    return bytes(bytes_)


def in_disorder(data: bytes, draw: random.Random) -> bytes:
    first, *lines = data.splitlines(True)
    at = draw.randrange(len(lines))
    part = lines[at : at + 6]
    draw.shuffle(part)
    return b"".join([first, *lines[:at], *part, *lines[at + 6 :]])


@pytest.mark.parametrize("damage", [without_a_line, cut_short, changed, in_disorder])
@pytest.mark.parametrize(
    "name", ["before the encoder", "killed before a call", "exception", "ended early"]
)
def test_of_damaged_files_whatever_is_said_is_true(
    name: str, damage: Callable[[bytes, random.Random], bytes], tmp_path: Path
) -> None:
    scenario, draw = SCENARIOS[name], random.Random(name)
    files = sorted(write(tmp_path, scenario.schedules).iterdir())
    whole = [file.read_bytes() for file in files]
    for _ in range(40):
        rank = draw.randrange(len(files))
        files[rank].write_bytes(damage(whole[rank], draw))
        report = report_of(tmp_path)
        # A file cut at the end of a line is that of a rank that was killed there.
        early = {rank} if damage in (cut_short, without_a_line) else set()
        assert accused(report) <= {*scenario.ranks, *early}, (rank, report)
        files[rank].write_bytes(whole[rank])


@pytest.mark.parametrize("lost", range(1, 8))
def test_the_records_that_a_stopped_rank_had_no_time_to_write_say_nothing(
    lost: int, tmp_path: Path
) -> None:
    """Two calls' records at most: where others have come further with it, it was there as well."""
    scenario = SCENARIOS["no heartbeat"]
    write(tmp_path, scenario.schedules, reports=True)
    (file,) = tmp_path.glob("rank-00002*")
    lines = file.read_bytes().splitlines(True)
    file.write_bytes(b"".join(lines[:-lost]))
    first = report_of(tmp_path).findings[0]
    assert (first.id, first.ranks) == (ids.SILENT, (2,))


def test_other_files_are_named_and_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, SCENARIOS["before the encoder"].schedules)
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 999)
    (tmp_path / "evil\x1b[31m\nname.jsonl").write_text('{"k":"header"\n')
    other = records.encode(header(1, 8, 1e9, Setup()))
    other = other.replace(b'"format":2', b'"format":1')
    (tmp_path / "other.jsonl").write_bytes(other)
    report = report_of(tmp_path)
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.MISSING_RANK, (5,))
    told = "\n".join(report.problems)
    assert "other.jsonl: format 1" in told and "evil?[31m?name.jsonl" in told
    assert "\x1b" not in told


def test_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [steps(30) + OUT] * 2)
    odd = [
        b'{"k":"leave","t":1,"e":"E","n":1,"shape":' + b"[" * 200_000 + b"}",
        b'{"k":"end"}',
        b"\x00" * 4096,
        b"null",
        b'"\xff\xfe"',
    ]
    file = sorted(tmp_path.iterdir())[0]
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join(lines[:40] + odd + lines[40:]))
    report = report_of(tmp_path)
    assert f"{len(odd)} lines are no records" in report.problems[0]
    assert report.findings == ()


def test_a_trace_that_ends_at_its_size_does_not_say_that_its_rank_is_stuck(
    tmp_path: Path,
) -> None:
    file = sorted(write(tmp_path, [steps(70) + OUT] * 3, reports=False).iterdir())[0]
    lines = file.read_bytes().splitlines(True)[:150]
    end = records.End(json.loads(lines[-1])["t"], records.AT_ITS_SIZE)
    file.write_bytes(b"".join([*lines, records.encode(end)]))
    assert not accused(report_of(tmp_path))


def test_calls_of_which_only_the_sync_is_recorded_are_compared_too(
    tmp_path: Path,
) -> None:
    """As a compiled encoder's are."""
    write(tmp_path, four(steps(70), [], steps(1)))
    for file in tmp_path.iterdir():
        lines = file.read_bytes().splitlines(True)
        kept = [
            line
            for line in lines
            if json.loads(line)["k"] in ("header", "sync", "stalled")
        ]
        file.write_bytes(b"".join(kept))
    report = report_of(tmp_path)
    assert accused(report) == {2} and not report.problems


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
        content = b"".join(map(records.encode, lines(rank)))
        (tmp_path / file_name(rank, 1e9)).write_bytes(content)
    report = report_of(tmp_path)
    assert report.findings == () and report.problems == ()


# The command.


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "nemo_patches", "diagnose", *arguments)


def test_the_command_prints_plain_text_and_gives_the_exit_code(tmp_path: Path) -> None:
    write(tmp_path / "hangs", SCENARIOS["before the encoder"].schedules)
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
    first = content["findings"][0]
    assert (first["id"], first["ranks"]) == (ids.MISSING_RANK, [5])


JSON_KEYS = {
    *("format", "folder", "world_size", "verdict", "next_step", "findings", "ranks"),
    *("problems", "earlier", "summary", "exit_code"),
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "No such file or directory"),
        (("folder",), "it is empty"),
        (("log.txt", "--html", "folder/no/x.html"), "its folder, is not there"),
    ],
)
def test_what_cannot_be_read_gets_exit_code_2_and_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "log.txt").write_text("hello\n")
    where, *rest = arguments
    done = run(str(tmp_path / where), *rest)
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("nemo-patches diagnose: ")


def test_what_a_file_says_is_printed_safely(tmp_path: Path) -> None:
    evil = "\x1b]0;x\x07\n[red]RED[/red]"
    write(tmp_path, four(steps(9), [Call(raises=evil), *OUT], steps(2)))
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
    assert "[red]RED[/red]" in done.stdout
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
