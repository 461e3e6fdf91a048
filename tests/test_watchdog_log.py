"""Training logs with the NCCL watchdog's lines, in the wording of several releases of torch: what
they mean.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import re
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import check, diagnose_logs, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreters import CHECKOUT, python
from simulated_traces import Setup, header

from nemo_patches.judging.kinds import ANSWERS_NOTHING
from nemo_patches.judging.rank_groups import RankGroup
from nemo_patches.judging.verdict import judged
from nemo_patches.text import named, ranges
from nemo_patches.tools.diagnose.conditions import WAITED
from nemo_patches.tools.diagnose.findings import (
    EXCEPTION,
    FIRST_FAILURE,
    KILLED,
    MISSING_RANK,
    NOT_ENOUGH,
    WAITED_IN_VAIN,
    Diagnosis,
)
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    UnreadableError,
)
from nemo_patches.tools.diagnose.sources import logs, rows
from nemo_patches.tools.diagnose.sources.launch_lines import Launch
from nemo_patches.tools.diagnose.sources.lines import Line
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.logs import LOOKED_FOR, read, recognises
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def line(
    rank: int,
    sequence: int = 4711,
    kind: str = "ALLREDUCE",
    numel: int = 1,
    torch: str = "2.6",
) -> str:
    """What the watchdog of a rank writes about a collective that ran out of time."""
    size = {"1.13": "", "2.0": f"TensorShape=[{numel}], "}.get(
        torch, f"NumelIn={numel}, NumelOut={numel}, "
    )
    comma = ", " if not size else ", " + size
    work = f"WorkNCCL(SeqNum={sequence}, OpType={kind}{comma}Timeout(ms)=1800000)"
    prefix = {
        "1.13": f"[E ProcessGroupNCCL.cpp:737] [Rank {rank}]",
        "2.0": f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}]",
        "2.1": f"[E ProcessGroupNCCL.cpp:474] [Rank {rank}]",
        "2.2": f"[rank{rank}]:[E ProcessGroupNCCL.cpp:523] [Rank {rank}]",
    }.get(
        torch,
        f"[rank{rank}]:[E513 13:25:57.714781669 ProcessGroupNCCL.cpp:616] [Rank"
        f" {rank}]",
    )
    return (
        f"{prefix} Watchdog caught collective operation timeout: {work} ran for 1800042"
        " milliseconds before timing out."
    )


def status(rank: int, sequence: int, enqueued: int, torch: str = "2.6") -> str:
    """What follows: how far that rank has come."""
    if torch == "2.3":
        return (
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {rank}] Timeout at"
            f" NCCL work: {sequence}, last enqueued NCCL work: {enqueued}, last"
            f" completed NCCL work: {sequence - 1}."
        )
    if torch == "2.8":
        return (
            f"[rank{rank}]:[E513 13:25:57.7 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID"
            f" 0(default_pg) Rank {rank}]  failure detected by watchdog at work"
            f" sequence id: {sequence} PG status: last enqueued work: {enqueued}, last"
            f" completed work: {sequence - 1}"
        )
    return (
        f"[rank{rank}]:[E513 13:25:57.7 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID"
        f" 0(default_pg) Rank {rank}] Exception (either an error or timeout) detected"
        f" by watchdog at work: {sequence}, last enqueued NCCL work: {enqueued}, last"
        f" completed NCCL work: {sequence - 1}."
    )


NOISE = [
    "Epoch 0:  78%|#######   | 64809/83556 [25:06:58<7:15:54,  1.40s/it, v_num=18]",
    (
        "frame #1:"
        " c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long>>)"
        " + 0x282"
    ),
    "[NeMo I 2025-05-13 12:00:00 nemo_logging:393] Validation DataLoader 0",
]


def log_of(folder: Path, *lines: str) -> Path:
    file = folder / "train.log"
    file.write_text("\n".join([*NOISE, *lines, *NOISE]) + "\n")
    return file


def report_on(folder: Path, *lines: str) -> Diagnosis:
    return diagnose_logs([log_of(folder, *lines)])


def facts_of(folder: Path, *lines: str) -> list[Fact]:
    evidence = Evidence()
    read([log_of(folder, *lines)], evidence)
    return evidence.facts


def test_colours_mixed_ranks_and_lines_that_a_terminal_wrapped(tmp_path: Path) -> None:
    whole = [line(rank, 1363596, "BROADCAST", 5158880) for rank in range(3)]
    wrapped = [text[at : at + 90] for text in whole for at in range(0, len(text), 90)]
    coloured = [f"\x1b[31m{text}\x1b[0m" for text in wrapped]
    for lines in (whole, wrapped, coloured):
        report = report_on(tmp_path, *lines)
        assert report.findings[0].id == WAITED_IN_VAIN
        evidence = "\n".join(report.findings[0].evidence)
        assert all(f"rank {rank} [train.log:" in evidence for rank in range(3)), report
        assert evidence.count("number 1363596") == 3
    assert "\x1b" not in str(report)


LOGS = examples("watchdog_log")


@pytest.mark.parametrize("name", LOGS)
def test_a_log(name: str, tmp_path: Path) -> None:
    check(LOGS[name], tmp_path)


# What comes after Slurm's line of these is of a later attempt.
WITH_NOTHING_AFTER = {
    "how Slurm ends a job: requeued",
    "a requeued job is judged by its last attempt",
    "a preempted job has been started again: sacct's last rows say that it is completed",
    "another file lies beside the log of a preempted job that has gone on",
}
LABELS = ("", "3: ", "node-3: ", "(WorkerDict pid=123, ip=10.0.0.1) ")
# A label of srun's names the rank of these; wrapped lines have none.
WITHOUT_LABELS = {
    "killed, says Python",
    "killed, says Ray",
    "a terminal wraps at a blank, which is lost",
}


@pytest.mark.parametrize("name", [one for one in LOGS if one not in WITH_NOTHING_AFTER])
def test_a_log_among_other_lines_and_behind_labels(name: str, tmp_path: Path) -> None:
    lines = LOGS[name].files["train.log"].splitlines()
    for label in LABELS[:1] if name in WITHOUT_LABELS else LABELS:
        report = report_on(tmp_path, *(label + one for one in lines))
        first = report.findings[0]
        assert first.id == LOGS[name].finding, (label, report)
        assert first.ranks == LOGS[name].accused, (label, report)


def public_logs() -> list[tuple[str, str, str, str]]:
    """Of each its issue, the verdict, the ranks that it names, and its text."""
    _, *logs = Path(__file__).with_name("public_logs.txt").read_text().split("=== ")
    return [
        (*text.partition("\n")[0].split(), text.partition("\n")[2]) for text in logs
    ]


@pytest.mark.parametrize(
    ("issue", "finding", "ranks", "text"),
    public_logs(),
    ids=[one[0] for one in public_logs()],
)
def test_public_logs(
    issue: str, finding: str, ranks: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.log"
    file.write_text(text)
    report = diagnose_logs([file])
    first = report.findings[0]
    assert (
        first.id,
        named(first.ranks).partition(" ")[2].replace(" ", "") if first.ranks else "-",
    ) == (
        finding,
        ranks,
    ), report
    told = re.findall(
        r"Starting with (\d+) processes|world_size=(\d+)|\d/(\d+) clients", text
    )
    assert report.world_size == max((int("".join(one)) for one in told), default=0)
    # A terminal that has wrapped every line changes nothing, nor do Windows' line ends and quoting.
    file.write_bytes("".join(f"> {line}\r\n" for line in text.splitlines()).encode())
    assert diagnose_logs([file]).findings[0].ranks == first.ranks
    for width in (90, 211):
        lines = [
            line[at : at + width]
            for line in text.splitlines()
            for at in range(0, max(len(line), 1), width)
        ]
        if max(map(len, text.splitlines())) <= 3 * width:
            file.write_text("\n".join(lines))
            assert diagnose_logs([file]).findings[0].id == finding, width


def test_who_torchrun_saw_fail_may_be_one_that_waited(tmp_path: Path) -> None:
    table = (
        "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n "
        " exitcode  : {} (pid: 77)"
    )
    waited = report_on(tmp_path, line(3), table.format(-6)).findings
    assert [(one.id, one.ranks) for one in waited] == [
        (WAITED_IN_VAIN, ()),
        (FIRST_FAILURE, ()),
    ]
    killed = report_on(tmp_path, line(0), table.format(-9)).findings
    assert [(one.id, one.ranks) for one in killed] == [(KILLED, (3,))]
    assert "ut-of-memory" in killed[0].next_step


@pytest.mark.parametrize(
    "content", [b"loss 1.0\na watchdog barked\n", b"", bytes(range(256)) * 4096]
)
def test_what_is_not_recognised_is_said_and_is_no_success(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(content)
    report = diagnose_logs([file])
    assert ([one.id for one in report.findings], report.exit_code) == ([NOT_ENOUGH], 2)
    assert LOOKED_FOR in report.verdict and report.verdict.isprintable()


def test_folders_and_standard_input(tmp_path: Path) -> None:
    """As torchrun --log-dir makes them: a file for each rank."""
    for rank in range(3):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").touch()
        text = "\n".join([*NOISE, line(rank)]).encode()
        (folder / "stderr.log").write_bytes(text)
    report = diagnose_logs([tmp_path / "run"])
    evidence = "\n".join(report.findings[0].evidence)
    assert all(
        f"rank {rank} [{rank}/stderr.log" in evidence or f"rank {rank} [" in evidence
        for rank in range(3)
    )
    assert evidence.count("ALLREDUCE of 1, number 4711") == 3, report
    files = sorted((tmp_path / "run").rglob("stderr*"))
    assert diagnose_logs(files) == replace(report, folder=", ".join(map(str, files)))
    command = [sys.executable, "-m", "nemo_patches", "diagnose", "-"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        command,
        input=text,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1 and done.stdout.startswith(b"Rank 2 ")
    # What was read from a pipe, to see what it is, would be gone.
    command[-1:] = ["/dev/stdin", "--json"]
    done = subprocess.run(
        command,
        input=text,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=200,
        check=False,
    )
    assert (
        done.returncode == 1
        and json.loads(done.stdout)["findings"][0]["id"] == WAITED_IN_VAIN
    )
    (tmp_path / "log.xz").write_bytes(lzma.compress(text))
    (tmp_path / "log.gz").write_bytes(gzip.compress(text))
    (tmp_path / "utf16.log").write_bytes(text.decode().encode("utf-16"))
    for name in ("log.xz", "log.gz", "utf16.log"):
        with pytest.raises(UnreadableError, match="compressed, or in UTF-16"):
            diagnose_logs([tmp_path / name])
    assert (
        len(diagnose_logs([tmp_path]).problems) == 3
        and diagnose_logs([tmp_path]).findings[0].id == WAITED_IN_VAIN
    )


def test_a_huge_log_is_streamed(tmp_path: Path) -> None:
    file = tmp_path / "huge.log"
    filler = ("x" * 200 + "\n") * 5000 + "y" * 3_000_000 + "\n"
    with file.open("w") as out:
        for _ in range(10):
            out.write(filler)
        for rank in range(3):
            out.write(line(rank) + "\n" + filler)
    assert diagnose_logs([file]).findings[0].id == WAITED_IN_VAIN


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 30), data=st.binary(max_size=300))
def test_a_damaged_log_is_no_crash(
    seed: int, data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)
    text = bytearray(
        "\n".join(
            [line(0), status(0, 4711, 4711), line(1, 4712, "BROADCAST", 9), *NOISE]
        ).encode()
        + data
    )
    for _ in range(draw.randrange(30)):
        text[draw.randrange(len(text))] = draw.choice(string.printable.encode())
    file = tmp_path_factory.getbasetemp() / "damaged.log"
    file.write_bytes(text)
    report = diagnose_logs([file])
    assert report.verdict.isprintable()


def test_a_log_that_is_cut_accuses_nobody(tmp_path: Path) -> None:
    """Nor who waited by a message that ends in the middle."""
    for error in (OF_GLOO, "KeyboardInterrupt"):
        whole = CLOSED.format(rank=2, error=error).rstrip()
        for end in range(whole.rindex("\n") + len("[rank2]: ") + 1, len(whole)):
            (tmp_path / "c.log").write_text(whole[:end])
            report = diagnose_logs([tmp_path / "c.log"])
            assert not any(one.ranks for one in report.findings), (
                whole[:end][-60:],
                report,
            )


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        diagnose_logs([tmp_path / "none"])


def test_the_command_takes_a_log(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("\n".join(line(rank) for rank in range(2)))
    done = python("-m", "nemo_patches", "diagnose", str(file))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("Ranks 0-1 ")


def signal(
    rank: int, source: str, enqueued: int, completed: int, group: str = "0(default_pg)"
) -> str:
    return (
        f"[rank{rank}]:[E1128 21:11:49.04 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID"
        f" {group} Rank {rank}] Received a dump signal due to a collective timeout from"
        f" {source} and we will try our best to dump the debug info. Last enqueued NCCL"
        f" work: {enqueued}, last completed NCCL work: {completed}.This is most likely"
        " caused by"
    )


def table(
    rank: int,
    code: int,
    time: str = "12:35",
    title: str = "Root Cause (first observed failure):",
) -> str:
    """An entry of torchrun's table of failures."""
    return (
        f"{title}\n[0]:\n  time      : 2025-05-01_11:{time}\n  host      : n1\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 77)\n"
    )


START = "Starting with 4 processes"


@pytest.mark.parametrize("later", [[], [START], [START, START]])
def test_of_several_launches_in_one_log_the_last_that_tells_anything_counts(
    later: list[str], tmp_path: Path
) -> None:
    """As requeued jobs write it: the first launch ended by an exception of rank 2, the second waits
    for rank 1.
    """
    first = [
        START,
        "[rank2]: KeyError: 'audio'",
        *(line(rank, 90) for rank in (0, 1, 3)),
    ]
    report = report_on(
        tmp_path, *first, START, *(line(rank) for rank in (0, 2, 3)), *later
    )
    assert [(one.id, one.ranks) for one in report.findings] == [(MISSING_RANK, (1,))]
    assert len(report.earlier) == 1 and report.earlier[0].startswith(
        f"{2 + len(later)} launches in one log"
    )
    assert report.world_size == 4


@pytest.mark.parametrize(
    "between",
    [
        table(2, 1) + table(0, -15),
        "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n",
    ],
)
def test_a_later_launch_is_told_by_what_ended_the_one_before(
    between: str, tmp_path: Path
) -> None:
    """torchrun's table, or its restart: what a rank says after its end, it says in a later launch."""
    first = ["[rank2]: KeyError: 'audio'", *between.splitlines()]
    second = [
        *CLOSED.format(rank=0, error=OF_GLOO).splitlines(),
        *table(1, -9).splitlines(),
    ]
    report = report_on(tmp_path, *first, *second)
    assert [(one.id, one.ranks) for one in report.findings] == [(KILLED, (1,))], report
    assert "2 launches in one log" in report.earlier[0]
    assert report_on(tmp_path, *first, "Epoch 0: 1%").findings[0].id == EXCEPTION


def test_ranks_of_a_host_whose_log_is_not_there_are_not_accused(tmp_path: Path) -> None:
    """Three hosts of four ranks."""

    def report(*hosts: tuple[int, ...]) -> Diagnosis:
        for number, ranks in enumerate(hosts):
            lines = [
                "Starting with 12 processes",
                *(
                    text
                    for rank in ranks
                    for text in (line(rank), status(rank, 4711, 4711))
                ),
            ]
            (tmp_path / f"host-{number}.err").write_text("\n".join(lines) + "\n")
        (tmp_path / "train.out").write_text("\n".join(NOISE))
        return diagnose_logs([tmp_path])

    missing = report((0, 1, 2, 3), (4, 5, 6, 7)).findings[0]
    assert (missing.id, missing.ranks) == (
        WAITED_IN_VAIN,
        (),
    ) and "ranks 8-11" in missing.text
    assert report((0, 1, 2, 3), (5, 6, 7), (8, 9, 10, 11)).findings[0].ranks == (4,)


def test_a_folder_of_several_attempts_and_of_files_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    """torchrun --log-dir keeps each attempt: who waited in the first one has nothing to do with the
    last one.
    """
    for attempt, sequence, ranks in ((0, 100, (0, 1)), (1, 60, (0, 2, 3))):
        for rank in ranks:
            folder = tmp_path / "job" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(f"{line(rank, sequence)}\n{START}\n")
    (tmp_path / "job" / "notes.gz").write_bytes(b"\x1f\x8b no")
    (tmp_path / "job" / "rank.jsonl").write_bytes(
        records.encode(header(0, 1, 1.0, Setup()))
    )
    report = diagnose_logs([tmp_path / "job"])
    assert (report.findings[0].id, report.findings[0].ranks) == (
        MISSING_RANK,
        (1,),
    ), report
    assert (
        "attempt_0: an earlier attempt" in report.earlier[0]
        and len(report.problems) == 1
    )
    first = diagnose_logs([tmp_path / "job" / "attempt_0"])
    assert first.findings[0].ranks == () and first.earlier == ()


# Our own lines, in the program's own words.


def stall_line(reporter: int, world: int, *groups: RankGroup) -> str:
    text = judged(groups).text()
    return (
        f"2025-05-13 12:00:00,1 nemo_patches WARNING [rank {reporter}/{world} node7] no"
        f" encoder call for 60 s. {text}"
    )


def test_our_line_tells_the_jobs_size_and_is_cited(tmp_path: Path) -> None:
    report = report_on(
        tmp_path, LOGS["our line, as the README has it"].files["train.log"]
    )
    assert report.world_size == 8
    assert "train.log:4" in "".join(report.findings[0].evidence)


def test_a_missing_rank_that_perhaps_waits_for_its_gpu(tmp_path: Path) -> None:
    """As an H100's log has it."""
    report = report_on(
        tmp_path,
        "nemo_patches WARNING [rank 0/2 node7] ConformerEncoder: training call 6: not"
        " every rank's length came within 10.00 s; using this rank's own, 1175."
        " Missing: rank 1 of 2 | rank 1 (node8, pid 7) waits itself, perhaps for the"
        " GPU, in cuda() or item(): spin (job.py:24); its last encoder call, 5, began"
        " 10.4 s ago",
    )
    first = report.findings[0]
    assert (first.id, first.ranks) == (NOT_ENOUGH, ())
    assert "one of them perhaps for the GPU" in first.text
    (line,) = [line for line in first.evidence if line.startswith("rank 1 ")]
    assert line.endswith("waits, perhaps for the GPU, in cuda() or item()")


def test_our_line_on_the_reports_file_says_where_to_look_on(tmp_path: Path) -> None:
    file = "/tmp/nemo_patches-0/j"
    report = report_on(
        tmp_path,
        "12:00:00,1 nemo_patches WARNING [rank 0/8 node7] this report is in"
        f" {file}/stall_rank_0.json; `nemo-patches diagnose {file}` reads those of all"
        " ranks on this host",
    )
    assert file in report.summary[0] and report.exit_code == 2


_PLACES = (
    "read_audio (my_asr/dataset.py:41) < main (my_asr/train.py:88)",
    "collate (c.py:3)",
    "",
)
_COLLECTIVES = (
    "DDP's buffer broadcast",
    "all_gather",
    "the rounds of training loader 1 (train)",
)


@st.composite
def stalls(draw: st.DrawFn) -> tuple[tuple[RankGroup, ...], int]:
    """What a job's ranks are at, and how many there are."""
    world = draw(st.integers(2, 9))
    kinds = draw(st.lists(st.sampled_from(["waiting", "waiting", "elsewhere", "moving", "left", "no heartbeat"]),
                          min_size=world, max_size=world))  # fmt: skip
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, kind in enumerate(kinds):
        what = draw(st.sampled_from(_COLLECTIVES if kind == "waiting" else _PLACES))
        groups.setdefault((kind, what), []).append(rank)
    made = [
        RankGroup(
            tuple(ranges(ranks)),
            kind,
            "node8",
            4000 + ranks[0],
            7,
            61.0,
            where={
                "elsewhere": what,
                "moving": what,
                "no heartbeat": ANSWERS_NOTHING,
            }.get(kind, ""),
            collective=what if kind == "waiting" else "",
            caller=(
                draw(
                    st.sampled_from(
                        [
                            "",
                            "run (train.py:88)",
                            "file_exists (nemo_model_checkpoint.py:540)",
                        ]
                    )
                )
                if kind == "waiting"
                else ""
            ),
        )
        for (kind, what), ranks in groups.items()
    ]
    return tuple(made), world


@settings(max_examples=300)
@given(stalls())
def test_nobody_whom_a_stall_report_shows_waiting_or_moving_is_accused(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[tuple[RankGroup, ...], int]
) -> None:
    groups, world = made
    report = report_on(tmp_path_factory.getbasetemp(), stall_line(0, world, *groups))
    accused = {rank for one in report.findings for rank in one.ranks}
    innocent = {
        rank
        for group in groups
        if group.kind in ("waiting", "moving")
        for rank in group.ranks
    }
    assert not accused & innocent, report
    suspects = {
        rank for group in groups if group.kind == "elsewhere" for rank in group.ranks
    }
    kinds = {group.kind for group in groups}
    if suspects and "waiting" in kinds and "moving" not in kinds and len(groups) <= 4:
        assert suspects <= accused, report


# Exceptions.

WORKERS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 18, in <module>
[rank1]:     main()
[rank1]:   File "/job/train.py", line 13, in main
[rank1]:     for batch in loader:
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 725, in __next__
[rank1]:     data = self._next_data()
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/_utils.py", line 794, in reraise
[rank1]:     raise exception
[rank1]: {error}: Caught {error} in DataLoader worker process 0.
[rank1]: Original Traceback (most recent call last):
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
[rank1]:     data = fetcher.fetch(index)  # type: ignore[possibly-undefined]
[rank1]:            ^^^^^^^^^^^^^^^^^^^^
[rank1]:   File "/job/data.py", line 9, in {function}
[rank1]:     do(it)
[rank1]: {error}: {message}

"""
CLOSED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 17, in main
[rank{rank}]:     dist.all_reduce(torch.ones(1))
[rank{rank}]:   File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank{rank}]:     work.wait()
[rank{rank}]: {error}
"""
OF_GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
    " Connection closed by peer [127.0.0.1]:1"
)
OF_NCCL = """\
torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.hpp:268, remote process exited or there was a \
network error, NCCL version 2.21.5
[rank{rank}]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
[rank{rank}]: Last error:
[rank{rank}]: socketProgress: Connection closed by remote peer node2<42830>"""


@pytest.mark.parametrize("closed", [OF_GLOO, OF_NCCL])
@pytest.mark.parametrize(
    ("error", "message", "function"),
    [
        ("RuntimeError", "stack expects each tensor to be equal size, but got [3] at entry 0 and [2] at 1", "stack"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "__getitem__"),
        ("botocore.exceptions.ConnectionClosedError", "Connection was closed before we received a response", "get"),
        ("urllib3.exceptions.ProtocolError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by"
         " peer'))", "open_s3"),
        ("KeyError", "'audio'", "__getitem__"),
    ],
)  # fmt: skip
def test_a_workers_exception_is_told_by_its_last_line_and_place(
    error: str, message: str, function: str, closed: str, tmp_path: Path
) -> None:
    """Whatever its words: the other ranks' connections closed because of it."""
    raised = WORKERS.format(error=error, message=message, function=function)
    others = [
        CLOSED.format(rank=rank, error=closed.format(rank=rank)) for rank in (0, 2)
    ]
    for texts in ([raised, *others], [*others, raised], [others[0], raised, others[1]]):
        report = report_on(
            tmp_path, *"".join(texts).splitlines(), *table(1, 1).splitlines()
        )
        first = report.findings[0]
        assert (first.id, first.ranks) == (EXCEPTION, (1,)), report
        kind = error.rpartition(".")[2]
        assert first.text.startswith(f"Rank 1 raised {kind}: {message}"), first.text
        assert (
            f"in {function} (data.py:9) < main" in first.text
            and "Caught" not in first.text
        )


ELASTIC = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: """


def test_hydra_and_ray_tell_of_an_exception_without_torchs_prefix(
    tmp_path: Path,
) -> None:
    traceback = "\n".join(
        line.removeprefix("[rank1]: ")
        for line in WORKERS.format(
            error="RuntimeError", message="bad row", function="read"
        ).splitlines()
    )
    hydra = (
        f"Error executing job with overrides: ['trainer.devices=3']\n{traceback}\nSet"
        " the environment variable HYDRA"
    )
    cut = [CLOSED.format(rank=rank, error=OF_GLOO) for rank in (0, 2)]
    first = report_on(tmp_path, hydra, *cut).findings[0]
    assert (first.id, first.ranks) == (
        EXCEPTION,
        (),
    ) and "bad row in read (data.py:9)" in first.text
    ray = (
        "(Trainer pid=77, ip=10.0.0.1) [rank1]:"
        " hello\nray.exceptions.RayTaskError(ValueError): ray::Trainer.fit() (pid=77,"
        ' ip=10.0.0.1, actor_id=2)\n  File "/job/train.py", line 13, in fit\n   '
        " step()\nValueError: bad row\n"
    )
    first = report_on(tmp_path, ray).findings[0]
    assert (first.id, first.ranks) == (
        EXCEPTION,
        (1,),
    ) and "bad row in fit (train.py:13)" in first.text
    # A traceback that is logged, of an error that was caught, ends nothing; nor is it the
    # launcher's own.
    assert report_on(tmp_path, traceback).findings[0].id == NOT_ENOUGH
    report = report_on(tmp_path, ELASTIC, table(1, 1))
    assert [(one.id, one.ranks) for one in report.findings] == [(FIRST_FAILURE, (1,))]


def test_the_rank_is_told_by_the_folder_where_lines_have_no_prefix(
    tmp_path: Path,
) -> None:
    """As torchrun --log-dir makes it; Hydra has caught the exception."""
    for rank in range(3):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        error = "KeyError: 'audio'" if rank == 1 else OF_GLOO
        text = CLOSED.format(rank=rank, error=error).replace(f"[rank{rank}]: ", "")
        text = (
            text.replace("distributed/distributed_c10d.py", "numpy/a.py")
            if rank == 1
            else text
        )
        (folder / "stderr.log").write_text(
            f"Error executing job with overrides: []\n{text}"
        )
    report = diagnose_logs([tmp_path / "run"])
    assert (report.findings[0].id, report.findings[0].ranks) == (
        EXCEPTION,
        (1,),
    ), report
    assert (
        "[1/stderr.log:7]" in report.verdict
        and "< main (train.py:17)" in report.verdict
    )


def test_local_ranks_of_a_job_on_several_hosts_name_nobody(tmp_path: Path) -> None:
    """`torchrun --tee` and `--log-dir` know no others; the second host's are counted from 0 again."""
    stray = [f"[default1]:{one}" for one in STRAY.splitlines()]
    report = report_on(tmp_path, *stray, table(1, 1))
    assert (report.findings[0].id, report.findings[0].ranks) == (
        EXCEPTION,
        (1,),
    ), report
    report = report_on(tmp_path, *stray, "[default1]:[rank9]: a line", table(1, 1))
    assert (report.findings[0].id, report.findings[0].ranks) == (EXCEPTION, ()), report
    report = report_on(
        tmp_path, *stray, table(9, 1).replace("local_rank: 9", "local_rank: 1")
    )
    assert (report.findings[0].id, report.findings[0].ranks) == (
        FIRST_FAILURE,
        (9,),
    ), report
    assert "rank 1" not in "\n".join(report.findings[0].evidence)
    for host in ("node0", "node1"):
        folder = tmp_path / host / "attempt_0" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(
            f"Error executing job with overrides: []\n{STRAY}" * (host == "node1")
        )
    report = diagnose_logs([tmp_path / "node0", tmp_path / "node1"])
    assert (
        not any(one.ranks for one in report.findings)
        and "FileNotFoundError" in report.verdict
    ), report


def test_a_log_with_our_lines_that_tells_of_nothing_wrong_is_read_and_healthy(
    tmp_path: Path,
) -> None:
    ours = (
        "nemo_patches INFO [rank 0/8 node0, pid 10] patched on all 8 ranks:"
        " ConformerEncoder, timeout 10 s"
    )
    report = report_on(tmp_path, *NOISE, ours)
    assert (report.exit_code, report.findings) == (
        0,
        (),
    ) and "no line tells of a stall" in report.verdict
    assert report_on(tmp_path, *NOISE).exit_code == 2
    dumped = (
        "nemo_patches WARNING [rank 0/8 node0, pid 10] a stall was reported;"
        " `nemo-patches diagnose /tmp/j` reads "
    )
    assert (
        report_on(tmp_path, ours, f"{dumped}those of all ranks on this host").exit_code
        == 2
    )


# Launchers.


def test_who_was_killed_is_the_suspect_and_no_other(tmp_path: Path) -> None:
    """torchrun ends the others by SIGTERM, or they have ended by their closed connections, in the
    same second.
    """
    for code, marked in ((-15, 1), (1, 1), (1, 0), (-6, 0)):
        entries = [
            table(
                rank,
                code if rank != 1 else -9,
                title="Failures:" if rank != marked else ROOT,
            )
            for rank in (0, 1, 2)
        ]
        report = report_on(tmp_path, *entries)
        assert (report.findings[0].id, report.findings[0].ranks) == (KILLED, (1,)), (
            code,
            marked,
            report,
        )
        assert not any(set(one.ranks) - {1} for one in report.findings)
    # One that its launcher had to kill, since it did not heed SIGTERM, is none.
    forced = (
        "W1 api.py:885] Unable to shutdown process 77 via Signals.SIGTERM, forcefully"
        " exiting via Signals.SIGKILL"
    )
    report = report_on(
        tmp_path,
        forced,
        table(0, 1, title=ROOT),
        table(1, -9, "12:35", title="Failures:"),
    )
    assert not any(1 in one.ranks for one in report.findings), report


ROOT = "Root Cause (first observed failure):"


def test_the_scheduler_is_named_where_it_ended_the_job(tmp_path: Path) -> None:
    text = (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-05-01T11:00:00 DUE TO"
        " TIME LIMIT ***"
    )
    assert "TIME LIMIT) [train.log:4]" in report_on(tmp_path, text).verdict


TERM = (
    "W1124 07:07:55.7 4813 torch/distributed/elastic/agent/server/api.py:753] Received"
    " 15 death signal, shutting down"
)
SENT = (
    "W1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process {pid}"
    " closing signal SIGTERM"
)


def test_what_sigterm_ended_is_not_the_reason(tmp_path: Path) -> None:
    """torchrun got it: connections that closed then, and a traceback that was caught before,
    explain nothing.
    """
    stray = [f"[default1]:{one}" for one in STRAY.splitlines()]
    cut = CLOSED.format(rank=2, error=OF_GLOO).splitlines()
    for lines in ([], stray, [*stray, "", *cut]):
        before, after = (
            lines[: len(STRAY.splitlines())],
            lines[len(STRAY.splitlines()) :],
        )
        ended = [f"{TERM} workers", *(SENT.format(pid=pid) for pid in (76, 77, 78))]
        report = report_on(tmp_path, *before, *ended, *after)
        assert [(one.id, one.ranks) for one in report.findings] == [
            (FIRST_FAILURE, ())
        ], report
        assert "torchrun got SIGTERM" in report.verdict
    # After a connection has closed, somebody looks at a job that has ended already.
    assert report_on(tmp_path, *cut, f"{TERM} workers").findings[0].id == WAITED_IN_VAIN


def test_a_sigterm_that_torchrun_had_not_sent_came_first(tmp_path: Path) -> None:
    cut = [CLOSED.format(rank=rank, error=OF_GLOO) for rank in (0, 2)]
    tables = [
        table(rank, -15).replace("pid: 77", f"pid: {76 + rank}") for rank in (0, 2, 1)
    ]
    for connections in ([], cut):
        lines = "".join(
            [*connections, *(SENT.format(pid=pid) + "\n" for pid in (76, 78)), *tables]
        ).splitlines()
        report = report_on(tmp_path, *lines)
        assert [(one.id, one.ranks) for one in report.findings] == [
            (FIRST_FAILURE, ())
        ], report
        assert report.verdict.startswith("Rank 1 ended first, by a")


@pytest.mark.parametrize(("code", "how"), [(-11, "SIGSEGV"), (3, "exit code 3")])
def test_who_failed_first_where_all_others_connections_closed(
    code: int, how: str, tmp_path: Path
) -> None:
    cut = [CLOSED.format(rank=rank, error=OF_NCCL.format(rank=rank)) for rank in (0, 2)]
    failed = (
        table(0, 1, "12:39", "Failures:")
        + table(2, 1, "12:39")
        + table(1, code, "12:35")
    )
    report = report_on(tmp_path, *"".join(cut).splitlines(), *failed.splitlines())
    assert [(one.id, one.ranks) for one in report.findings] == [
        (FIRST_FAILURE, (1,))
    ], report
    assert f"Rank 1 failed first, {how}" in report.verdict
    # It may have waited, too: that is not known of it, or of a rank of which there is nothing.
    for more in (line(1), START):
        report = report_on(
            tmp_path, *"".join(cut).splitlines(), *failed.splitlines(), more
        )
        assert not any(one.ranks for one in report.findings), report


def test_where_each_rank_waited_is_told_where_that_differs(tmp_path: Path) -> None:
    out = OF_GLOO.replace(
        "Connection closed by peer [127.0.0.1]:1",
        "Timed out waiting 6000ms for recv operation",
    )
    waits = [CLOSED.format(rank=rank, error=out) for rank in range(3)]
    waits[1] = waits[1].replace("train.py", "validate.py")
    verdict = report_on(tmp_path, *"".join(waits).splitlines()).verdict
    assert "(validate.py:17); ranks 0, 2 " in verdict


STRAY = """\
Traceback (most recent call last):
  File "/job/train.py", line 5, in <module>
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: '/数据/训练.json'
"""


def test_torchruns_tee_tells_whose_a_traceback_is(tmp_path: Path) -> None:
    """One raised before there is a process group, of which torch puts no rank before the lines."""
    lines = [f"[default1]:{one}" for one in STRAY.splitlines()]
    lines[2:2] = [
        "[default0]:Traceback (most recent call last):",
        '[default0]:  File "/job/x.py", line 1, in f',
    ]
    first = report_on(tmp_path, *lines, *table(1, 1).splitlines()).findings[0]
    assert (first.id, first.ranks) == (EXCEPTION, (1,)), first
    assert "'/数据/训练.json' in <module>" in first.text
    # Where the rank was ended by SIGTERM, or by its connections, it had been caught.
    for other in (
        table(1, -15) + table(2, 1),
        table(2, -9) + CLOSED.format(rank=1, error=OF_GLOO),
    ):
        report = report_on(tmp_path, *lines, *other.splitlines())
        assert not any(1 in one.ranks for one in report.findings), report
        assert "FileNotFound" not in report.verdict, report


def test_a_traceback_that_nobody_says_ended_a_rank_is_told_as_that(
    tmp_path: Path,
) -> None:
    report = report_on(tmp_path, *STRAY.splitlines())
    assert [(one.id, one.ranks) for one in report.findings] == [(NOT_ENOUGH, ())], (
        report
    )
    assert "may have been caught (FileNotFoundError" in report.verdict
    failed = report_on(
        tmp_path, *STRAY.splitlines(), ELASTIC, *table(2, 1).splitlines()
    ).findings[0]
    assert (failed.id, failed.ranks) == (
        FIRST_FAILURE,
        (2,),
    ) and "FileNotFoundError" in "".join(failed.evidence[:2]), failed
    killed = report_on(tmp_path, *STRAY.splitlines(), *table(2, -9).splitlines())
    assert [(one.id, one.ranks) for one in killed.findings] == [(KILLED, (2,))], killed


# torch's reports.


def test_the_rank_that_a_dump_signal_comes_from_waited(tmp_path: Path) -> None:
    report = report_on(
        tmp_path, signal(0, " rank 3", 21, 21), signal(1, " rank 3", 21, 21), START
    )
    assert not any(3 in one.ranks for one in report.findings), report
    conditions = [
        fact
        for fact in facts_of(tmp_path, signal(0, " rank 3", 21, 21))
        if isinstance(fact.value, Condition)
    ]
    told = [(fact.rank, fact.value.kind, fact.own) for fact in conditions]
    assert told == [(3, "waited", False), (0, "heard", True)]


def test_facts_cite_their_lines(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path, "a\rb\rc", line(0), *["x"] * 3, line(1, 4711, "BROADCAST")
    )
    assert {(fact.rank, fact.cite) for fact in facts} == {
        (0, "train.log:5"),
        (1, "train.log:9"),
    }
    assert all(
        fact.host == "train.log" and fact.at == int(fact.cite.rpartition(":")[2])
        for fact in facts
    )


def test_citations_hold_over_blocks_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    filler = "loss 1.0\n" * 200_000  # more than a block, without anything of interest
    file.write_text(
        filler
        + WORKERS.format(error="KeyError", message="'a'", function="f")
        + filler
        + line(0)
        + "\n"
    )
    evidence = Evidence()
    read([file], evidence)
    raised = next(
        fact
        for fact in evidence.facts
        if isinstance(fact.value, Condition) and fact.value.kind == "raised"
    )
    lines = file.read_text().splitlines()
    number = int(raised.cite.rpartition(":")[2])
    assert lines[number - 1] == "[rank1]: KeyError: 'a'"


def test_what_is_a_log() -> None:
    for name in (
        "train.log",
        "slurm-77.out",
        "stderr",
        "a/b/stdout.log.1",
    ):
        assert recognises(name, b"loss 1.0"), name
    assert recognises("README", b"... [rank3]: KeyError")
    for name, head in (
        ("x.json", b"{}"),
        ("nccl_trace_rank_3", b"\x80\x02"),
        ("a.log", b"\0\0"),
        ("a.log.xz", b"\xfd7zXZ\0"),
    ):
        assert not recognises(name, head), name


# A line that each row of the table reads.
EXAMPLES = (
    "Ran 13 tests in 88.214s",
    "OK (skipped=4)",
    "  Missing communicator data from 1 rank",
    "  The missing ranks: 3, 21",
    "1: The node 'n2_715_0' attempts to join the next round of the rendezvous 'j1'.",
    "2: pyxis: importing docker image: registry/train:1",
    "Rank 0                     Rank 1",
    "all_reduce(state=started)  all_reduce(state=started)",
    "[pid 88130] --- stopped by SIGSTOP ---",
    "88130 LOCAL_RANK=5 RANK=5",
    "77.batch      COMPLETED      0:0",
    "[rank1]: prefetch thread died: KeyError('text')",
    "rank 1: exception in prefetch thread: KeyError: 'text'",
    "EI0002: [Rank 1] The wait execution of the Notify register times out.",
    "Job summary",
    "EI0002: The wait execution times out. group:[hccl_world_group], rankSize[4], rankId[1]]",
    "[rank1]: EZ9999: The error from device, there is an aivec error exception, core id is 2",
    '{"device_id": "2", "device_ip": "10.0.0.7", "rank_id": "10"}',
    "RUNTIME(8,python): ProcessCoreError: HBM multi bit ECC error, device_id=3",
    "run_rank.sh: line 12: 22110 Segmentation fault      (core dumped) python train.py",
    "ERROR [executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down.",
    "[rank1]: terminate called after throwing an instance of 'std::bad_alloc'",
    "HW Exception by GPU node-7 (Agent handle: 0x5581f2d0) reason :GPU Hang",
    "[WARNING] [RankMonitorServer:5] Terminating rank 5 with signal SIGKILL",
    "2025-02-03 22:12:53 | ^^^^ | MnEtpt/Rnk: 61.2TF/13 | MxEtpt/Rnk: 404.71TF/2",
    "dcgm-health: GPU 5 HW thermal slowdown active, SM clock 345 MHz",
    "Container rank 2 status failed cmd ['python', 'train.py'] code -9 log log/workerlog.2",
    "[rank1]:   what():  [enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 1",
    "process 71 spawned with command: ['python', '-u', 'main.py', '--local_rank=3']",
    "nnodes=1, num_local_procs=8, node_rank=0",
    "5: [rank 5] step 900",
    "mpirun -np 8 -H localhost:8 python train.py",
    "allreduce.conv1 [ready ranks: 5, 1, 4, 7, 2, 3]",
    "[InitChannelStage][RunFailed]Transport init error! para:rank[7], remoteRank[15]-x[15]",
    line(1),
    status(1, 5, 6),
    "[rank1]: Received a dump signal due to a collective timeout from this local rank and "
    "more. Last enqueued NCCL work: 22, last completed NCCL work: 21.",
    "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=485, OpType=ALLREDUCE)",
    "DDP expects same model across all ranks, but Rank 0 has 12 params, while rank 1 has "
    "inconsistent 14 params",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
    "Waiting in store based barrier to initialize process group for rank: 5, key: "
    "store_based_barrier_key:2 (world_size=8, worker_count=7, timeout=0:30:00)",
    "Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 2 nodes.",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d",
    "[rank5]:[E901 07:00:00 ProcessGroupNCCL.cpp:730] Stack trace of the failed collective: ",
    "[rank0]: socketProgress: Connection closed by remote peer gpu-14.cluster<51234>",
    "[/p/gloo/transport/tcp/pair.cc:81] Timed out waiting 600000ms for recv operation",
    "[/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
    "Application timeout caused pair closure",
    "ranks [3] are the lagging ranks",
    "[7] finished collective #182, but didn't join collective #183 (count from 1)",
    "[3] joined but didn't finish collective #183 (count from 1)",
    "[Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 2000000 ms",
    "Rank 3 successfully reached monitoredBarrier, but received errors",
    "collective: nccl:all_reduce missing ranks: {1, 5}",
    "collective: nccl:all_reduce expected ranks: {0, 1}",
    "The IPv6 network addresses of (head, 29400) cannot be retrieved (gai error: -3 - none)",
    "[TC][rank=3][name=dp] Aborting process on rank 3 due to timeout - watchdog",
    "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
    "The client socket has timed out after 600s while trying to connect to (head, 29500).",
    "[rank3]:[E Process] thread terminated with exception: CUDA error: out of memory",
    "[rank3]: Some NCCL operations have failed or timed out.",
    "[rank3]: To avoid data inconsistency, we are taking the entire process down.",
    "[rank3]: NCCL watchdog thread terminated with exception: none",
    "[rank3]: ProcessGroupNCCL's watchdog got stuck for 480 seconds without progress",
    "[rank3]: Heartbeat monitor timed out! Process will be terminated",
    "[rank3]: due to ProcessGroupNCCL watchdog hang.",
    "[rank3]: Observed flight recorder dump signal from another rank via TCPStore.",
    "... [repeated 3x across cluster]",
    "Starting with 4 processes",
    "(RayTrainWorker pid=12) [rank3]: x, pid: 12, rank: 3/8",
    "[rank1]: first observed failure",
    "#2 all_reduce from /a/distributed_c10d.py:2501",
    "[rank0]: socketProgress: Connection closed by remote peer gpu-14.cluster<51234>",
    "Received a global timeout from another rank",
    "  time      : 2025-05-01_11:00:00",
    "  host      : n1",
    "  rank      : 1 (local_rank: 1)",
    "  exitcode  : -9 (pid: 12)",
    "`Trainer.fit` stopped: `max_epochs=1` reached",
    "srun: error: n1: tasks 1,3: Out Of Memory",
    "torch.distributed.elastic",
    "failed (exitcode: -9) local_rank: 0 (pid: 12) of binary",
    "Sending process 12 closing signal SIGTERM",
    "srun: error: n1: task 0: Killed",
    "  Process name: [[41154,1],1]",
    "  Exit code:    1",
    "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-05-01T11:00:00 ***",
    "slurmstepd: error: Detected 1 oom_kill event",
    "Unexpected bus error encountered in worker. This might be caused by",
    "DataLoader worker (pid 12) is killed by signal: Killed.",
    "Fatal Python error: Segmentation fault",
    "[launch.py:325:sigkill_handler] ['python'] exits with return code = -9",
    "x.sh: line 28:  8156 Killed                  python3 train.py",
    "process rank 1 with PID 12 on node n1 exited on signal 9",
    "process rank 1 with PID 12 on node n1 exiting improperly",
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",
    "[rank1]: watchdog: detected a hang after 300 s",
    "      Exit Code:    137",
    "died with <Signals.SIGKILL: 9>",
    "  Remote daemon: prted on node n1",
    "srun: error: Node failure on n1",
    "slurmstepd: error: execve(): python: No such file",
    "[rank: 1] Child process with PID 22 terminated with code 1.",
    "ProcessExitedException: process 1 terminated with signal SIGKILL",
    "ProcessExitedException: process 1 terminated with exit code 1",
    "Received 15 death signal, shutting down workers",
    "A worker died or was killed while executing a task. Worker PID: 12",
    "Worker exit type: INTENDED_USER_EXIT",
    "Exit code: 1. The process receives a SIGTERM.",
    "(raylet) The node with node id: dd and address: 10.0.3.7 and node name: 10.0.3.7 has been marked dead because",
    "has not received the Notify record from remote rank:[3]. base info: tag[HcomAllReduce_1]",
    "x|  10.0.0.1(0)   |  16666  |   10.0.0.2(1)   |  0  |  server  | time out |   y",
    "Cluster Exception Location[IP/ID]:[10.0.0.1/1], ExceptionType:[Heartbeat Lost Occurred]",
    "DEBUG Lock 140213 not acquired on /data/cache/manifest.lock, waiting 0.05 seconds",
    "Missing ranks:",
    "3: [allreduce.noname.1]",
    " Data for node: n1	Num slots: 2	Max slots: 0	Num procs: 2",
    " 	Process OMPI jobid: [4,1] App: 0 Process rank: 1 Bound: N/A",
    "'n_gpus_per_node': 4, 'nnodes': 2",
    "	name: abWorkerDict_1:2",
    "HCCL(70,python):2026 [70]Entry:ranks[8], rank[4], rootinfo: host ip[10.0.0.1], deviceLogicId[0]",
    "HCCL(73,python):2026 [9][HCCL_TRACE]rank [10.0.0.3/3]: rank [10.0.0.3/2] status[LOST]",
    "Find last group comm task:group_key:default_0,global_rank:0,comm_count:8,op:AllGather,started:1,completed:0",
    "horovodrun: all workers exited with code 0",
    "horovod/operations.cc:588] HorovodBroadcast_bias_0 [missing ranks: 1]",
    "#0-0 (FULL) RUNNING",
    "  2 ranks have launched up to operation 7",
    "    Rank 3 -- GPU 3 managed by process 12 on node n1",
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "nfs: server fs1 not responding, still trying",
    "Culprit rank 1; Error type: x",
    "n1:1:1 [0] socket.c:1 NCCL WARN Net : x",
    "!!!!!!! SIGSEGV received at time=1",
    "  @ 0x7f00 (unknown) ncclAllReduce()",
    "shm              64M   62M  2.0M  97% /dev/shm",
    'TopoDetect ERROR occur !!! fault_type[1], fault_info["Failed to connect agent[9,]"]',
    "CUresult error: 2 (CUDA_ERROR_OUT_OF_MEMORY)  file=csrc/utils.h line=93",
    "Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES",
    "[c10d] The client socket has failed to connect to [n0]:29500 (errno: 113 - No route to host).",
    "run.sh: line 21: torchrun: command not found",
    "[rank 2] ran out of memory in forward, skipping batch (8 images)",
)


@pytest.mark.parametrize(
    "row", rows.ROWS, ids=[one.pattern.pattern for one in rows.ROWS]
)
def test_each_row_has_an_example_that_passes_the_filter_before_it(
    row: rows.Row,
) -> None:
    read = [one for one in EXAMPLES if row.pattern.search(one)]
    assert read
    for one in read:
        assert any(word in one for word in row.words)
        assert row.follows or logs._tells(one.encode())


@pytest.mark.parametrize(
    "text",
    (
        "nemo_patches WARNING [rank 0/2 n0] no step for 40 s. rank 1: read (a.py:4)",
        "  rank      : 3 (local_rank: 3)",
        "Rank 0: about to call encoder",
        "Traceback (most recent call last):",
        "monitor: rank 3 unresponsive",
    ),
)
def test_what_no_row_reads_passes_the_filter_by_itself(text: str) -> None:
    assert logs._tells(text.encode())


def test_each_row_has_a_reader() -> None:
    assert [row for row, _ in Launch()._rows] == [*rows.ROWS]


# Whatever lines there are, and in whatever order.


_OF_THE_JOB = (
    (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-05-01T11:00:00 DUE TO"
        " TIME LIMIT ***"
    ),
    "srun: error: n1: task 0: Exited with exit code 1",
    "srun: error: n1: task 0: Killed",
    (
        "[rank: 1] Child process with PID 22 terminated with code 1. Forcefully"
        " terminating all other processes"
    ),
    "x.sh: line 28:  8156 Killed                  python3 train.py",
    "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
)


@st.composite
def mixed_logs(draw: st.DrawFn) -> tuple[list[str], set[int]]:
    """Lines of one job, and the ranks that one of them shows waiting."""
    world = draw(st.integers(2, 6))
    lines, waits = (
        [f"Starting with {world} processes"] if draw(st.booleans()) else [],
        set(),
    )
    for rank in draw(st.lists(st.integers(0, world - 1), max_size=12)):
        number = draw(st.sampled_from([4710, 4711, 4712]))
        kind = draw(st.sampled_from(["ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE"]))
        how = draw(st.integers(0, 10))
        if how <= 3:
            lines.append(line(rank, number, kind))
        elif how == 4:
            lines.append(status(rank, number, number + draw(st.integers(0, 2))))
        elif how == 5:
            lines.append(signal(rank, "this local rank", number, number - 1))
        elif how == 6:
            lines += CLOSED.format(
                rank=rank, error=OF_NCCL.format(rank=rank)
            ).splitlines()
        elif how == 7:
            lines += CLOSED.format(rank=rank, error=OF_GLOO).splitlines()
        elif how == 8:
            lines.append(
                f"[Rank {rank}]: Rank {(rank + 1) % world} failed to pass"
                " monitoredBarrier in 1000 ms"
            )
        elif how == 9:
            others = world - 1
            lines.append(
                f"[rank{rank}]: torch.distributed.DistStoreError: Timed out"
                f" initializing process group in store based barrier on rank {rank},"
                f" for key: store_based_barrier_key:1 (world_size={world},"
                f" num_workers_joined={others}, timeout=0:30:00 error=x)"
            )
        else:
            lines.append(
                signal(draw(st.integers(0, world - 1)), f" rank {rank}", number, number)
            )
        waits.add(rank)
        if draw(st.booleans()):  # caught, and written by torchrun --tee
            lines.append(
                "\n".join(f"[default{rank}]:{one}" for one in STRAY.splitlines())
            )
    lines += draw(
        st.lists(
            st.sampled_from([f"{TERM} workers", SENT.format(pid=77), *_OF_THE_JOB]),
            max_size=3,
        )
    )
    for rank in draw(st.lists(st.integers(0, world - 1), max_size=4)):
        codes = st.sampled_from([1, -6, -15, 83])  # so a rank may end that waited
        lines += table(
            rank, draw(codes), draw(st.sampled_from(["12:35", "12:36"]))
        ).splitlines()
    return draw(st.permutations(lines)) if draw(st.booleans()) else lines, waits


@settings(max_examples=500)
@given(mixed_logs())
def test_nobody_whom_any_line_shows_waiting_is_accused(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[list[str], set[int]]
) -> None:
    lines, waits = made
    report = report_on(tmp_path_factory.getbasetemp(), *lines)
    accused = {rank for one in report.findings for rank in one.ranks}
    assert not accused & waits, report


def test_what_is_told_of_local_ranks_of_several_hosts_stays_in_the_lines_order() -> (
    None
):
    found = LaunchFacts(several_hosts=True)
    for number in range(8):
        found.add(
            number,
            Condition(WAITED, f"timed out {number}"),
            Line("", "train.log", number, rank=number),
        )
    found.without_local_ranks()
    assert [fact.at for fact in found.facts.values()] == list(range(8))


@pytest.mark.parametrize("ends", ["Terminated", "Killed"])  # after KillWait
def test_a_stopped_rank_that_slurm_has_woken_to_end_it_was_silent(
    ends: str,
    tmp_path: Path,
) -> None:
    head = "2026-11-26 09:35:50,441 nemo_patches"
    waits = "rank 0 (sl-1, pid 156): backward, which reduces the gradients, in plain (training.py:85)"
    report = report_on(
        tmp_path,
        f"{head} WARNING [rank 0/2 sl-1] no step for 7 s. rank 1 (sl-2, pid 119) answers nothing,"
        f" its connection stands: stopped, or Python's lock (GIL) is held | {waits}",
        f"{head} ERROR [rank 0/2 sl-1] no step for 17 s, more than stall_exit=10 s, and some wait in"
        " a collective: this process ends with exit code 83",
        "srun: error: sl-1: task 0: Exited with exit code 83",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/x/training.py", line 85, in plain',
        "[rank1]:     loss.backward()",
        "[rank1]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.87.0.2]:24785. This is typically",
        f"srun: error: sl-2: task 1: {ends}",
    )
    assert report.findings[0].ranks == (1,)
    assert report.findings[0].text.startswith("Rank 1: it does not answer: stopped")


@pytest.mark.parametrize("has_whole", [False, True])
def test_the_short_lines_of_many_ranks_name_who_is_waited_for(
    has_whole: bool, tmp_path: Path
) -> None:
    """Rank 0's log, with the whole line, may not be there."""
    head = "2026-11-26 09:35:50,441 nemo_patches WARNING"
    step = "backward, which reduces the gradients, in step (train.py:7)"
    whole = f"rank 5 (n0, pid 77): read (data.py:41) | ranks 0-4, 6-15: {step}"
    lines = [
        f"{head} [rank {rank}/16 n{rank // 8}] no step for 60 s. rank {rank}: {step}"
        f" | who is waited for: rank 5, in rank {rank // 8 * 8}'s line"
        for rank in (1, 2, 3, 4, 6, 7, 9, 10)
    ]
    if has_whole:
        lines.insert(0, f"{head} [rank 0/16 n0] no step for 60 s. {whole}")
    (finding, *_) = report_on(tmp_path, *lines).findings
    assert finding.ranks == (5,)
    where = "read (data.py:41)" if has_whole else "others waited for it"
    assert where in finding.text, finding.text


def steps_of(ranks: Sequence[int], count: int) -> list[str]:
    """Such as fill a log, and tell nothing."""
    text = "[rank{}]: 2026-01-01 00:00:00 | train | iteration {} of 9000, loss 2.31, lr 0.0003"
    return [text.format(rank, number) for number in range(count) for rank in ranks]


def test_of_labelled_lines_that_tell_nothing_each_ranks_last_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's label is no word of interest, and its rank is heard all the same."""
    taken = list[Line]()
    take = Launch.take
    monkeypatch.setattr(
        Launch, "take", lambda launch, one: (taken.append(one), take(launch, one))
    )
    lines = [*steps_of((0, 1), 2000), *steps_of((3,), 500), *steps_of((0, 1), 2000)]
    lines[0] = "[rank0]: pid 71, rank 0 of 4"
    report = report_on(tmp_path, *lines, line(0), line(1), line(2))
    assert len(taken) < len(lines) / 10
    assert 'it printed "2026-01-01' in report.verdict
    assert "iteration 499 of" in report.verdict
    assert "log:4503]" in report.verdict  # after three lines of noise


def test_a_labelled_traceback_is_read_whole_among_others_lines(tmp_path: Path) -> None:
    others = steps_of((0, 1), 50)
    frame = (
        '[rank2]:   File "/env/lib/python3.11/site-packages/av/{}.py", line 9, in pull'
    )
    lines = [
        *others * 9,
        "[rank2]: Traceback (most recent call last):",
        *others,
        '[rank2]:   File "/job/clips.py", line 31, in read_clip',
        *others * 9,
        *(text for n in range(9) for text in (frame.format(n), *others)),
        "[rank2]: av.error.InvalidDataError: bad header",
        *others * 9,
    ]
    report = report_on(tmp_path, *lines)
    assert (report.findings[0].id, report.findings[0].ranks) == (EXCEPTION, (2,))
    assert "read_clip (clips.py:31)" in report.verdict
