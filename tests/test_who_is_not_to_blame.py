"""Ranks that evidence seems to accuse and does not, and the places, ends and threads that are told
instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import report_of
from simulated_traces import Setup, file_name, header
from test_evidence import ELSEWHERE, SYNC, facts, report, still

from nemo_patches.judging.kinds import GONE
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.samples import Frame, Thread, thread_of
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.rank_facts import Fact
from nemo_patches.tools.diagnose.sources import dumps
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
ENCODER = "ConformerEncoder"
CALLS = 6
OURS = "2026-11-28 18:46:13,278 nemo_patches WARNING [rank {}/3 vm] "


def told(folder: Path, *lines: str, name: str = "train.log") -> ids.Diagnosis:
    (folder / name).write_text("\n".join(lines) + "\n")
    return report_of(folder / name)


def call(
    n: int, outcome: str = records.CAME, encoder: str = ENCODER
) -> list[records.Record]:
    at = {"t": float(n), "e": encoder, "n": n}
    enter = records.Enter(
        **at, training=True, shape=[2, 16, 100], dtype="float32", device="cpu"
    )
    sync = records.Sync(
        **at, outcome=outcome, round=n, waited=0.01, local=100, result=100
    )
    return [enter, sync, records.Leave(**at, shape=[2, 16, 13])]


def traced(folder: Path, rank: int, *more: records.Record, size: int = 3) -> None:
    """A trace of some steps that went well, and what follows."""
    well = [one for n in range(1, CALLS + 1) for one in call(n)]
    lines = [header(rank, size, 1000.0, Setup()), *well, *more]
    (folder / file_name(rank, 1000.0)).write_bytes(
        b"".join(records.encode(one) for one in lines)
    )


@pytest.mark.parametrize(
    ("kind", "where"),
    [("no heartbeat", "answers nothing"), ("elsewhere", "acquire_lock (train.py:9)")],
)
def test_of_ranks_behind_only_those_are_missing_that_the_running_job_named(
    kind: str, where: str, tmp_path: Path
) -> None:
    """Under DDP's defaults rank 0 waits for rank 1 before its encoder: it is behind, too."""
    missing = records.Stalled(
        10.0, ENCODER, 7, [1], [kind], [where], [""], text="", waited=True
    )
    traced(tmp_path, 0)
    traced(tmp_path, 1)
    traced(tmp_path, 2, *call(7, records.TIMEOUT), missing)
    found = report_of(tmp_path)
    assert [one.ranks for one in found.findings] == [(1,)], found
    line = (
        f"{OURS.format(2)}{ENCODER}: training call 7: not every rank's length came within"
        " 3.00 s; using this rank's own, 100. Missing: rank 1 of 3 | rank 1 (vm, pid 9) is"
        f" elsewhere: {where}; its last encoder call, 6, began 3.0 s ago"
    )
    told(tmp_path, line)
    found = report_of(tmp_path)
    assert [one.ranks for one in found.findings] == [(1,)], found


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_batch_is_a_note_and_hides_no_place(rank: int, tmp_path: Path) -> None:
    places = (
        f"rank {rank} (vm, pid 11): read_label (train.py:63) < main (train.py:80); last batch"
        " 0 of epoch 3 (train) | rank 2 (vm, pid 13): backward, which reduces the gradients, in step (train.py:9)"
    )
    found = told(tmp_path, f"{OURS.format(2)}no encoder call for 40 s. {places}")
    first = found.findings[0]
    assert first.ranks == (rank,)
    assert first.text.startswith(f"Rank {rank}: it is in read_label (train.py:63)")
    assert "last batch 0 of epoch 3 (train)" in first.text


def test_exit_code_83_is_stall_exit_and_no_wait_in_vain(tmp_path: Path) -> None:
    table = (
        "  rank      : {0} (local_rank: {0})",
        "  exitcode  : {1} (pid: 10{0})",
    )
    lines = [
        "Root Cause (first observed failure):",
        "  time      : 2026-11-28_18:46:10",
        *(one.format(0, 83) for one in table),
    ]
    found = told(tmp_path, *lines)
    assert "stall_exit, exit code 83" in found.verdict
    assert not any("waited in vain" in one for one in found.findings[0].evidence)


def test_clocks_that_differ_take_no_verdict_away() -> None:
    """Of two hosts: how long each has waited decides, and not whose clock is ahead."""
    for off in (40.0, 3 * 3600.0, -3 * 3600.0):
        there = [
            replace(one, host="node2", at=one.at + off) if one.at else one
            for one in still(1, ELSEWHERE, 60.0, at=1_000.0)
        ]
        found = report(still(0, SYNC, 60.0, at=1_000.0), there, world=2)
        assert (found.findings[0].id, found.findings[0].ranks) == (
            ids.MISSING_RANK,
            (1,),
        ), off


def test_a_rank_that_has_enqueued_all_but_this_may_be_inside_the_call(
    tmp_path: Path,
) -> None:
    """NCCL's counter rises when a call returns."""
    timeout = (
        "[rank0]:[E1128 03:56:02.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught"
        " collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=7,"
        " NumelOut=7, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
    )
    signal = (
        "[rank1]:[E1128 03:56:03.1 ProcessGroupNCCL.cpp:1590] [PG ID 0 PG GUID"
        " 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from"
        " rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work:"
        " 8, last completed NCCL work: 8."
    )
    status = (
        "[rank0]:[E1128 03:56:02.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID"
        " 0(default_pg) Rank 0] Exception (either an error or timeout) detected by watchdog"
        " at work: 9, last enqueued NCCL work: 9, last completed NCCL work: 8."
    )
    first = told(tmp_path, timeout, status, signal).findings[0]
    assert first.ranks == (1,)
    assert "has not got past ALLREDUCE of 7, number 9" in first.text
    assert "inside the call for it" in first.text


DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
WORKER_DIED = "A worker died or was killed while executing a task. Worker PID: 230 Node IP: 10.0.0.2"
OF_RANK = (
    "(WorkerDict pid=230) [rank2]:[E1128 03:56:02.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog"
    " caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLGATHER, NumelIn=7,"
    " NumelOut=7, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
)


@pytest.mark.parametrize("death", [DIED, WORKER_DIED])
def test_a_death_of_unknown_kind_after_its_own_time_out_is_a_consequence(
    death: str, tmp_path: Path
) -> None:
    found = told(tmp_path, OF_RANK, death, "\tpid: 230")
    assert found.findings[0].id == ids.WAITED_IN_VAIN
    assert not any(one.id == ids.KILLED for one in found.findings)
    found = told(tmp_path, OF_RANK.replace("230", "231"), death)
    assert not any(2 in one.ranks for one in found.findings)


def test_a_death_of_unknown_kind_is_a_kill_where_nobody_has_waited(
    tmp_path: Path,
) -> None:
    assert told(tmp_path, WORKER_DIED).findings[0].id == ids.KILLED


THREADS = """Process {pid}: python train.py
Python v3.11.9 (/usr/bin/python3.11)

Thread {pid} (active): "MainThread"
    {main}
    train_step (recipe/sft.py:288)
    <module> (recipe/run.py:9)

Thread 19{pid} (idle): "saver"
    all_gather_object (torch/distributed/distributed_c10d.py:3092)
    gather_shards (saver.py:21)
    run (threading.py:58)
"""
REDUCES = "all_reduce (torch/distributed/distributed_c10d.py:2810)"


def test_two_threads_of_a_rank_in_collectives_are_both_told(tmp_path: Path) -> None:
    for rank in range(2):
        dump = THREADS.format(pid=610 + rank, main=REDUCES)
        (tmp_path / f"rank{rank}.txt").write_text(dump)
    first = report_of(tmp_path).findings[0]
    assert (first.id, first.ranks) == (ids.OUT_OF_STEP, ())
    assert "two threads" in first.text and "in thread saver" in first.text
    absent = THREADS.format(pid=612, main="read (data.py:4)").partition("\nThread 19")[
        0
    ]
    (tmp_path / "rank2.txt").write_text(absent)
    assert report_of(tmp_path).findings[0].ranks == (2,)


def test_a_place_of_a_thread_is_not_the_ranks() -> None:
    thread = [
        Fact(0, replace(SYNC, thread="saver"), "node1, pid 100", at=9.0, host="node1")
    ]
    found = report(facts(0, ELSEWHERE), thread, still(1, SYNC), still(2, SYNC))
    assert found.findings[0].ranks == (0,)


def second_encoder(left_out_at: int) -> list[records.Record]:
    """Of steps that call two encoders."""
    lines: list[records.Record] = []
    for n in range(1, CALLS + 1):
        lines += call(n)
        if n != left_out_at:
            number = n - (0 < left_out_at < n)
            lines += call(number, outcome=records.LOCAL, encoder=f"{ENCODER} #2")
    return lines


def test_an_encoder_that_one_rank_has_left_out_is_told_by_where_the_calls_part(
    tmp_path: Path,
) -> None:
    for rank in range(3):
        calls = second_encoder(4 if rank == 1 else 0)
        lines = [header(rank, 3, 1000.0, Setup()), *calls, records.End(90.0)]
        (tmp_path / file_name(rank, 1000.0)).write_bytes(
            b"".join(records.encode(one) for one in lines)
        )
    first = report_of(tmp_path).findings[0]
    assert first.id == ids.UNEVEN_CALLS
    part = "part at call 8, after a training call of ConformerEncoder: next, rank 1 a"
    assert part in first.text


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            (
                "backward, which reduces the gradients, in step (a.py:9)",
                "barrier, in validation_step (a.py:20)",
            ),  # or trains again, while rank 1 validates longer: no batch tells
            "if rank 1 ran out of training batches: `NEMO_PATCHES_STOP_TOGETHER=training`; if it"
            " is uneven evaluation: `NEMO_PATCHES_METRICS=deferred`",
        ),
        (
            (
                "all_gather, in validation_step (a.py:9)",
                "barrier, in on_validation_epoch_end (a.py:20)",
            ),
            "uneven evaluation: `NEMO_PATCHES_METRICS=deferred`",
        ),
        (  # Lightning's hook decides before the user's names
            (
                "DDP's buffer broadcast, in training_meets_validation (a.py:9), during"
                " training_step",
                "barrier, in save (a.py:20), while saving a checkpoint during on_train_end",
            ),
            "most likely rank 1 ran out of training batches: `NEMO_PATCHES_STOP_TOGETHER=training`",
        ),
        (  # a file's name is no function's
            (
                "backward, which reduces the gradients, in step (train_eval.py:9)",
                "barrier, in gather (train_eval.py:20)",
            ),
            "if it is uneven training: `NEMO_PATCHES_STOP_TOGETHER=training`",
        ),
        (  # a step's end is not the loop's
            (
                "backward, which reduces the gradients, in training_step (a.py:9)",
                "barrier, in on_train_batch_end (a.py:20), while saving a checkpoint",
            ),
            "if it is uneven training: `NEMO_PATCHES_STOP_TOGETHER=training`",
        ),
        (
            ("all_reduce, in average_loss (a.py:9)", "barrier, in save (a.py:20)"),
            "if it is uneven training: `NEMO_PATCHES_STOP_TOGETHER=training`; if it is"
            " uneven evaluation: `NEMO_PATCHES_METRICS=deferred`",
        ),
    ],
)
def test_the_remedy_of_uneven_batches_is_named(
    places: tuple[str, str], said: str, tmp_path: Path
) -> None:
    first, second = places
    line = f"no step for 40 s. rank 0 (vm, pid 10): {first} | rank 1 (vm, pid 11): {second}"
    found = told(tmp_path, OURS.format(0).replace("/3", "/2") + line)
    assert found.findings[0].id == ids.OUT_OF_STEP
    assert said.lower() in found.next_step.lower()


@pytest.mark.parametrize("at", ("4", "{rank}"), ids=("the same", "each another"))
def test_reports_of_all_ranks_are_read_once(at: str, tmp_path: Path) -> None:
    """Each rank reports all ranks: read line by line that is quadratic, and takes minutes."""
    size = 4096
    lines = []
    for seconds in (40, 100, 220, 460):
        for rank in range(size):
            begin = f"nemo_patches WARNING [rank {rank}/{size} n{rank // 8}]"
            place = f"read (a.py:{at.format(rank=rank)})"
            lines += [
                f"{begin} {ENCODER}: training call 9: Missing: ranks 5-{size - 1} of {size} |"
                f" rank 5 (n0, pid 5) is elsewhere: {place}; its last encoder call, 8,"
                f" began {rank % 7}.0 s ago",
                f"{begin} no step for {seconds + rank % 3} s. rank 5 (n0, pid 5): {place}"
                f" | ranks 0-4, 6-{size - 1}: barrier, in save (a.py:9)",
            ]
    begin_s = time.process_time()
    found = told(tmp_path, *lines)
    assert found.findings[0].ranks == (5,)
    assert time.process_time() - begin_s < 20  # 2 s, and 5; line by line minutes


def test_counters_of_torchs_own_start_and_its_own_threads_are_no_remarks() -> None:
    started = {
        "frames": [
            {
                "name": "start_processes",
                "filename": "torch/multiprocessing/spawn.py",
                "line": 298,
                "locals": [{"name": "i", "repr": "0"}],
            }
        ]
    }
    assert not thread_of(1, started).counters
    at = (Frame("read", "/home/u/data.py", 4),)
    others = [Thread("MainThread", 2, frames=at), Thread("length sync", 3, frames=at)]
    assert not dumps.other_threads(Thread(tid=1), others)
    assert dumps.other_threads(Thread(tid=1), [Thread("saver", 4, frames=at)])


STALL = "no encoder call for 2 s. rank 2 (vm, pid 13): read_label (train.py:63) < main (train.py:80)"
WAITS = "barrier, in step (train.py:9)"


def test_our_lines_of_one_host_count_in_the_order_of_their_times(
    tmp_path: Path,
) -> None:
    """A rank's stderr may stand behind that of another one, as in files of their own."""
    late = f"{STALL} | ranks 0-1: {WAITS}"
    early = f"{STALL} | rank 1 (vm, pid 12): goes on without encoder calls, now in step (a.py:9)"
    lines = [
        OURS.format(0) + late,
        OURS.format(2).replace("13,278", "12,900").replace("WARNING", "INFO") + early,
    ]
    found = told(tmp_path, *lines)
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.MISSING_RANK, (2,))
    # Of several hosts, by the order of the lines: their clocks may differ.
    lines[1] = lines[1].replace(" vm] ", " node2] ")
    assert told(tmp_path, *lines).findings[0].ranks == ()


def test_of_ranks_that_left_the_first_is_accused_where_connections_closed(
    tmp_path: Path,
) -> None:
    """Rank 0 was cut off by rank 1's end: the line of that error has no rank."""
    cut = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:52635"
    left = "have left: they ended, or destroyed their process group"
    lines = [
        f"{OURS.format(2)}{ENCODER}: gone: rank 1 of 3 | rank 1 (vm, pid 12) has left: it ended,"
        " or destroyed its process group",
        f"{OURS.format(2)}no encoder call for 4 s. ranks 0-1: {left} | rank 2 (vm, pid 13): {WAITS}",
    ]
    traceback = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 9, in step',
        cut,
    ]
    first = told(tmp_path, *lines, *traceback).findings[0]
    assert (first.id, first.ranks) == (ids.ENDED, (1,))
    first = told(tmp_path, *lines).findings[0]
    assert (first.id, first.ranks) == (ids.ENDED, (1,))
    assert any("rank 0" in line or "anks 0" in line for line in first.evidence), first
    first = told(tmp_path, *lines[1:]).findings[0]
    assert (first.id, first.ranks) == (ids.ENDED, (0, 1))
    assert "left after the first may have been cut off" in first.text
    assert "it left" not in first.text


def test_a_stack_and_the_others_records_are_told_together() -> None:
    """Rank 1 is behind, by records, and waits elsewhere, by its stack."""
    entered = [
        Fact(
            rank,
            Entry(rank, "0", 9, "nccl:all_reduce", "[9]", caller="step (a.py:3)"),
            "dumps",
        )
        for rank in (0, 2)
    ]
    behind = Fact(1, Entry(1, "0", 8, "nccl:all_reduce", done=True), "dumps")
    gathers = facts(1, replace(SYNC, collective="all_gather_object"))
    found = report(entered, [behind], gathers, entries={"0": {0, 1, 2}}, world=3)
    first = found.findings[0]
    assert (first.id, first.ranks) == (ids.OUT_OF_STEP, ())
    assert "Rank 1 is in all_gather_object of the length sync" in first.text
    assert "ranks 0, 2 in nccl:all_reduce [9], number 9" in first.text
    assert "collected yet" not in first.text


def test_of_others_an_unknown_rank_is_not_counted(tmp_path: Path) -> None:
    cut = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:52635"
    gone = f"{OURS.format(2)}this job: gone: rank 1 of 3 | rank 1 (vm, pid 12): its process has gone"
    first = told(tmp_path, gone, "Traceback (most recent call last):", cut).findings[0]
    assert (first.id, first.ranks) == (ids.KILLED, (1,))
    assert first.text.endswith(
        "no record tells of its end. Others had their connections closed."
    )
    first = told(tmp_path, gone, f"[rank0]: {cut}").findings[0]
    assert first.text.endswith("Rank 0 had its connection closed.")


def test_of_ranks_that_were_late_one_remark_tells(tmp_path: Path) -> None:
    """Not one for each, with the same advice."""
    in_vain = [*call(7, records.TIMEOUT), *call(8, records.TIMEOUT)]
    ends = [*call(9), records.End(90.0)]
    traced(tmp_path, 0, *in_vain, *ends)
    traced(tmp_path, 1, *call(7), *call(8), *ends)
    traced(tmp_path, 2, *call(7), *call(8, records.TIMEOUT), *ends)
    [found] = report_of(tmp_path).findings
    assert (found.id, found.ranks) == (ids.LATE, (1, 2))
    assert "(rank 1 to 2, rank 2 to 1); ranks 0, 2 went on" in found.text


def test_where_one_ranks_collectives_go_on_the_stall_is_over_for_all(
    tmp_path: Path,
) -> None:
    """Only one rank's log may be there."""
    stalled = f"{OURS.format(0)}{STALL} | ranks 0-1: {WAITS}"
    over = f"{OURS.format(0)}this rank's collectives go on, after 70 s"
    assert told(tmp_path, stalled).findings[0].ranks == (2,)
    found = told(tmp_path, stalled, over.replace("13,278", "14,000"))
    assert found.findings[0].ranks == (), found
    again = stalled.replace("13,278", "15,000")
    found = told(tmp_path, stalled, over.replace("13,278", "14,000"), again)
    assert found.findings[0].ranks == (2,), found


def test_of_a_loaders_worker_that_crashed_the_traceback_is_not_the_reason(
    tmp_path: Path,
) -> None:
    error = "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly"
    lines = [
        "Traceback (most recent call last):",
        '  File "/job/a.py", line 9, in step',
    ]
    found = told(tmp_path, *(f"[rank1]: {line}" for line in (*lines, error)))
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.EXCEPTION, (1,))
    assert "its own lines, and `dmesg`" in found.next_step


def test_of_a_rank_that_crashed_after_an_evaluation_of_its_own_that_is_told(
    tmp_path: Path,
) -> None:
    """Gloo aborts a process where collectives pair that are not the same."""
    text = (
        "no encoder call for 40 s. rank 1 (vm, pid 9): its process has gone | ranks 0, 2:"
        " barrier, in step (train.py:9)"
    )
    gone = records.Stalled(
        40.0, "", 0, [1], ["no heartbeat"], [GONE], [""], text=text, waited=True
    )
    odd = [
        replace(one, training=False) if isinstance(one, records.Enter) else one
        for one in call(7)
    ]
    traced(tmp_path, 1, *odd)
    for rank in (0, 2):
        traced(tmp_path, rank, *call(7), gone)
    found = report_of(tmp_path)
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.KILLED, (1,))
    assert "next, rank 1 an evaluation call" in found.next_step
    assert "NEMO_PATCHES_STOP_TOGETHER=training" in found.next_step


CLOSED = "[/p/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:9"


def test_of_closed_connections_who_had_left_is_named_as_the_live_line_does(
    tmp_path: Path,
) -> None:
    """In what one rank alone has left, its trace or its log."""
    left = records.Stalled(8.0, ENCODER, 0, [1], ["left"], [""], [""])
    closed = records.Raised(9.0, "", 0, "RuntimeError", CLOSED, "")
    traced(tmp_path, 2, *call(7), left, closed)
    by_trace = report_of(tmp_path).findings[0]
    assert (by_trace.id, by_trace.ranks) == (ids.ENDED, (1,))
    gone = f"{ENCODER}: gone: rank 1 of 3 | rank 1 (vm, pid 9) has left: it ended"
    lines = (f"{OURS.format(2)}{gone}", f"RuntimeError: {CLOSED}")
    by_log = told(tmp_path, *lines).findings[0]
    assert (by_log.id, by_log.ranks) == (ids.ENDED, (1,))
    # Of several that had left, one may have been cut off by the other.
    gone = f"{ENCODER}: gone: ranks 0-1 of 3 | ranks 0-1 have left: they ended"
    several = told(tmp_path, f"{OURS.format(2)}{gone}", f"RuntimeError: {CLOSED}")
    assert several.findings[0].ranks == ()


def test_a_line_that_is_no_warning_decides_nothing_and_is_quoted(
    tmp_path: Path,
) -> None:
    text = (
        "no encoder call for 40 s. rank 2 (vm, pid 9): lock (train.py:9) | rank 1: goes"
    )
    line = records.Stalled(47.0, "", 0, [], [], [], text=text, waited=False)
    traced(tmp_path, 2, *call(7), line)
    first = report_of(tmp_path).findings[0]
    assert (first.id, first.ranks) == (ids.NOT_ENOUGH, ())
    assert text in first.text


def test_of_a_record_the_groups_count_before_the_text(tmp_path: Path) -> None:
    """They are those of the stall report's JSON: with the rank's worker, and its process."""
    place = {"calls": 7, "idle": 40.0, "still": 40.0, "host": "vm"}
    away = {"ranks": [1], "kind": "elsewhere", "pid": 11, "where": "read (data.py:9)"}
    waits = {
        "ranks": [0, 2],
        "kind": "waiting",
        "pid": 12,
        "where": "step (train.py:3)",
    }
    worker = "worker (pid 81) has /data/a.tar open"
    groups = [
        {**place, **away, "collective": "", "worker_states": [worker]},
        {**place, **waits, "collective": "barrier", "caller": "step (train.py:3)"},
    ]
    line = records.Stalled(47.0, "", 0, [], [], [], waited=True, groups=groups)
    traced(tmp_path, 2, *call(7), line)
    first = report_of(tmp_path).findings[0]
    assert (first.id, first.ranks) == (ids.MISSING_RANK, (1,))
    assert worker in first.text
    assert "barrier of step (train.py:3), which ranks 0, 2 have waited in" in first.text


def test_a_silent_rank_that_has_come_since_is_accused_no_more(tmp_path: Path) -> None:
    waited = (
        f"{OURS.format(0)}{ENCODER}: training call 7: not every rank's length came within"
        " 3.00 s; using this rank's own, 100. Missing: rank 1 of 3 | rank 1 (vm, pid 9)"
        " answers nothing, its connection stands: stopped"
    )
    came = f"{OURS.format(0)}{ENCODER}: recovered: rank 1 came 12.00 s late"
    assert told(tmp_path, waited).findings[0].ranks == (1,)
    first = told(tmp_path, waited, came).findings[0]
    assert (first.id, first.ranks) == (ids.NOT_ENOUGH, ())


def test_what_the_running_job_has_said_of_uneven_batches_holds(tmp_path: Path) -> None:
    """It knows more than its line's places: the batches."""
    cure = "most likely uneven evaluation: `NEMO_PATCHES_METRICS=deferred`"
    line = (
        "no step for 40 s. rank 0 (vm, pid 10): backward, which reduces the gradients, in"
        " run (a.py:9), during backward | rank 1 (vm, pid 11): barrier, in f (a.py:20),"
        f" during validation_step | {cure}; the ranks wait in different collectives; which"
        " of them is wrong cannot be told"
    )
    found = told(tmp_path, OURS.format(0).replace("/3", "/2") + line)
    assert cure[1:] in found.next_step


STACKS = Path(__file__).parent / "logs" / "lightning_stacks.txt"


def lightning_stacks() -> dict[str, list[str]]:
    """By name: what the next step says, and the frames, with "--" between the ranks."""
    sections = STACKS.read_text().split("\n=== ")[1:]
    return {name: lines for name, *lines in (one.split("\n") for one in sections)}


def py_spy_frames(lines: Sequence[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("."):
            yield from py_spy_frames(lightning_stacks()[line])
        elif line:
            function, place, *variables = line.split()
            file, _, number = place.rpartition(":")
            names = (one.split("=") for one in variables)
            yield {
                "name": function,
                "filename": file,
                "line": int(number),
                "locals": [{"name": name, "repr": value} for name, value in names],
            }


@pytest.mark.parametrize(
    "name", [name for name in lightning_stacks() if not name.startswith(".")]
)
def test_frames_of_lightning_decide_what_uneven_batches_need(
    name: str, tmp_path: Path
) -> None:
    says, *lines = lightning_stacks()[name]
    between = lines.index("--")
    for rank, stack in enumerate((lines[:between], lines[between + 1 :])):
        thread = {"thread_name": "MainThread", "owns_gil": False, "pid": 10 + rank}
        content = [{**thread, "frames": list(py_spy_frames(stack))}]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    first = report_of(tmp_path).findings[0]
    assert says.removeprefix("says: ") in first.next_step + first.text, first
