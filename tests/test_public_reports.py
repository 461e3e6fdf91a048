"""Logs and stacks of the kinds that people put into public reports: who is named, and nobody else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from test_watchdog_log import diagnose_logs

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.rank_facts import Condition, Evidence
from nemo_patches.tools.diagnose.sources import logs
from nemo_patches.tools.diagnose.sources.report_files import ReportedGroup

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

GLOO = (
    "RuntimeError: [/p/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"
    " 600000ms for recv operation to complete"
)
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@dataclass(frozen=True)
class Report:
    """files: their texts by name. ranks: those accused by the first finding. said, unsaid: parts of
    the verdict.
    """

    files: dict[str, str]
    id: str
    ranks: tuple[int, ...] = ()
    said: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    exit_code: int = 1
    step: str = ""
    never: tuple[int, ...] = field(default=())  # in any finding


def log(*lines: str) -> dict[str, str]:
    return {"train.log": "\n".join(lines) + "\n"}


def timed_out(
    rank: int, number: int, kind: str, numel: int, group: str
) -> tuple[str, str]:
    prefix = f"[rank{rank}]:[E901 07:00:00.{rank}00000000 ProcessGroupNCCL.cpp"
    work = (
        f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn={numel}, NumelOut={numel},"
        " Timeout(ms)=600000)"
    )
    return (
        (
            f"{prefix}:688] [Rank {rank}] Watchdog caught collective operation timeout:"
            f" {work} ran for 600011 milliseconds before timing out."
        ),
        (
            f"{prefix}:2271] [PG ID {group} Rank {rank}]  failure detected by watchdog"
            f" at work sequence id: {number} PG status: last enqueued work: {number},"
            f" last completed work: {number - 1}"
        ),
    )


def heard(rank: int) -> str:
    return (
        f"[rank{rank}]:[E901 07:00:01.000000000 ProcessGroupNCCL.cpp:1849] [PG ID 0 PG"
        f" GUID 0(default_pg) Rank {rank}] Observed flight recorder dump signal from"
        " another rank via TCPStore."
    )


def prefixed(rank: int, *lines: str, times: int = 1) -> tuple[str, ...]:
    return tuple(f"[rank{rank}]:" * times + f" {line}" for line in lines)


def in_checkpoint(rank: int) -> tuple[str, ...]:
    return prefixed(
        rank,
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 70, in main',
        "    save(step)",
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException"
        " ranks:dict_keys([1])",
        "Traceback (most recent call last): (RANK 1)",
        '  File "/job/writer.py", line 12, in write',
        "    file.flush()",
        "OSError: [Errno 28] No space left on device",
        times=2,
    )


RICH = (
    "╭──────────── Traceback (most recent call last) ────────────╮",
    "│ /job/train.py:80 in main                                  │",
    "│                                                           │",
    "│ ❱ 80 │   fit(model)                                       │",
    "│ /job/data.py:41 in read                                   │",
    "│ ❱ 41 │   raise ValueError(name)                           │",
    "╰───────────────────────────────────────────────────────────╯",
    "ValueError: a.wav is empty",
)
LOGURU = (
    "Traceback (most recent call last):",
    "",
    '  File "/job/train.py", line 80, in main',
    "    fit(model)",
    "    │   └ <Model>",
    '> File "/job/data.py", line 41, in read',
    "    raise ValueError(name)",
    "                     └ 'a.wav'",
    "",
    "ValueError: a.wav is empty",
)
IN_PACKAGE = (
    "Traceback (most recent call last):",
    (
        '  File "/venv/lib/python3.11/site-packages/my_recipes/finetune.py", line 745,'
        " in write_state"
    ),
    "    torch.distributed.barrier()",
    (
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py",'
        " line 81, in wrapper"
    ),
    "    return func(*args, **kwargs)",
    f'  File "{C10D}", line 4556, in barrier',
    "    work.wait()",
    GLOO,
)
SLURM = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO "
FAILED = (
    "E0901 07:00:05.000000 71 api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 81)"
    " of binary: /venv/bin/python"
)
STARTS = tuple(
    f"INFO started: pid {100 + rank}, rank {rank} / size 3" for rank in range(3)
)


def unhandled(pid: int) -> tuple[str, ...]:
    return (
        (
            "Unhandled exception <class 'RuntimeError'> in thread <_MainThread>, proc"
            f" {pid}."
        ),
        "Traceback (most recent call last):",
        '  File "/job/engine.py", line 291, in one_epoch',
        f'  File "{C10D}", line 1707, in all_reduce',
        GLOO,
    )


def table(*codes: int) -> list[str]:
    """torchrun's, of ranks that failed in one second. Local ranks have the pids from 100 on."""
    lines = []
    for rank, code in enumerate(codes):
        lines += [
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {100 + rank})",
        ]
        lines[-2:-2] = ["  time      : 2026-09-01_07:00:05", "  host      : node1"]
    return lines


CLOSING = (
    "W0901 07:00:04.000000 71 api.py:897] Sending process 101 closing signal SIGTERM"
)
ALL_BUT_ONE = [
    line
    for rank in (0, 2, 3)
    for line in timed_out(rank, 57, "ALLREDUCE", 4096, "0 PG GUID 0(default_pg)")
]

READ_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/job/data.py", line 41, in read',
    "ValueError: a.wav is empty",
)


def labelled(form: str, ranks: tuple[int, ...], *lines: str) -> tuple[str, ...]:
    return tuple(form.format(rank) + line for rank in ranks for line in lines)


def in_group(*lines: str) -> tuple[str, ...]:
    """As Python prints an ExceptionGroup of one task's exception."""
    return (
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/job/train.py", line 80, in main',
        "  |     async with TaskGroup() as group:",
        '  |   File "/usr/lib/python3.11/asyncio/taskgroups.py", line 145, in __aexit__',
        "  |     raise me from None",
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        *(f"    | {line}" for line in lines),
        "    +------------------------------------",
    )


def in_json(*lines: str, **more: object) -> tuple[str, ...]:
    """As Docker's json-file driver writes them."""
    return tuple(
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "T", **more})
        for line in lines
    )


def stamped(form: str, *lines: str) -> tuple[str, ...]:
    """form: of the time before each line, with its number."""
    return tuple(form.format(number) + line for number, line in enumerate(lines, 10))


CONTAINERS = "2026-09-01T07:00:{}.484018001Z stderr F "
CLOSED = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
READ = ("a.wav is empty", "read (data.py:41)")
FORMS = {
    "an exception group": Report(
        log(*prefixed(1, *in_group(*READ_TRACEBACK))),
        ids.EXCEPTION,
        (1,),
        ("Rank 1 raised ValueError", *READ, "main (train.py:80)"),
    ),
    "an exception group in another one, without a rank": Report(
        log(
            *in_group(
                "Exception Group Traceback (most recent call last):",
                '  File "/job/io.py", line 9, in load',
                "ExceptionGroup: 2 shards (2 sub-exceptions)",
            )[:-1],
            "    +-+---------------- 1 ----------------",
            "      | ValueError: a.wav is empty",
            "      +---------------- 2 ----------------",
            "      | OSError: b.wav is missing",
            "      +------------------------------------",
            FAILED,
        ),
        ids.EXCEPTION,
        (),
        ("raised ValueError: a.wav is empty", "load (io.py:9) < main (train.py:80)"),
    ),
    "JSON of Docker": Report(
        log(*in_json(*prefixed(0, CLOSED), *prefixed(1, *READ_TRACEBACK))),
        ids.EXCEPTION,
        (1,),
        READ,
        ("stream",),
    ),
    "JSON of Docker, and nemo_patches' own line": Report(
        log(
            *in_json(
                "nemo_patches WARNING [rank 0/2 n0] no step for 60 s. rank 1 (n1, pid 33): read"
                " (data.py:41) < main (train.py:80) | rank 0 (n0, pid 32): barrier, in save"
                " (train.py:9)"
            )
        ),
        ids.MISSING_RANK,
        (1,),
        ("read (data.py:41)",),
    ),
    "JSON of a logger, with a whole traceback and the rank": Report(
        log(
            json.dumps({"rank": 1, "exception": "\n".join(READ_TRACEBACK)}),
            json.dumps({"rank": 0, "message": CLOSED}),
            FAILED,
        ),
        ids.EXCEPTION,
        (1,),
        READ,
        never=(0,),
    ),
    "JSON with objects within, as torch's error files and collectors have": Report(
        log(
            json.dumps(
                {
                    "rank": 1,
                    "message": {"x": {"py_callstack": "\n".join(READ_TRACEBACK)}},
                }
            ),
            *(json.dumps({"json": {"message": line}}) for line in prefixed(0, CLOSED)),
            FAILED,
        ),
        ids.EXCEPTION,
        (1,),
        READ,
        never=(0,),
    ),
    "what is no JSON, or says nothing": Report(
        log("{", "[" * 9, '{"rank": "x"}', '{"log": 3}', *prefixed(1, *READ_TRACEBACK)),
        ids.EXCEPTION,
        (1,),
        READ,
    ),
    "times of containers before the launcher's labels": Report(
        log(
            *stamped(
                CONTAINERS, *labelled("[default{}]:", (1,), *READ_TRACEBACK), FAILED
            )
        ),
        ids.EXCEPTION,
        (1,),
        READ,
    ),
    "the journal's times": Report(
        log(
            *stamped("Sep 01 07:00:{} node1 python[123]: ", *READ_TRACEBACK),
            FAILED,
        ),
        ids.EXCEPTION,
        (),
        READ,
    ),
    "SageMaker's labels": Report(
        log(
            *labelled("[1,mpirank:{},algo-1]<stderr>:", (3,), *READ_TRACEBACK),
            "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
        ),
        ids.EXCEPTION,
        (3,),
        READ,
    ),
    "MPICH, by its signal": Report(
        log(*STARTS, HYDRA, "=   PID 102 RUNNING AT n3", "=   EXIT CODE: 9"),
        ids.KILLED,
        (2,),
        ("SIGKILL, says mpirun",),
    ),
    "MPICH, by a signal in words": Report(
        log(
            HYDRA,
            "=   PID 102 RUNNING AT n3",
            "=   EXIT CODE: 137",
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        ),
        ids.KILLED,
        (),
        ("SIGKILL, says mpirun",),
    ),
    "MPICH, by an exit code": Report(
        log(HYDRA, "=   PID 102 RUNNING AT n3", "=   EXIT CODE: 1"),
        ids.FIRST_FAILURE,
        (),
        ("exit code 1, says mpirun",),
    ),
    "Intel's MPI": Report(
        log(
            HYDRA,
            "=   RANK 1 PID 23 RUNNING AT n3",
            "=   KILLED BY SIGNAL: 9 (Killed)",
            *prefixed(0, CLOSED),
        ),
        ids.KILLED,
        (1,),
        ("SIGKILL, says mpirun",),
        never=(0,),
    ),
    "MPI_ABORT of Open MPI": Report(
        log("MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD"),
        ids.FIRST_FAILURE,
        (2,),
        ("it called MPI_Abort",),
    ),
    "MPI_ABORT in another communicator": Report(
        log(
            "MPI_ABORT was invoked on rank 0 in communicator MPI COMMUNICATOR 3",
            *timed_out(1, 9, "ALLREDUCE", 4096, "0"),
        ),
        ids.WAITED_IN_VAIN,
        (),
        never=(0,),
    ),
    "MPI_Abort of MPICH": Report(
        log("application called MPI_Abort(MPI_COMM_WORLD, -1) - process 2"),
        ids.FIRST_FAILURE,
        (2,),
        ("it called MPI_Abort",),
    ),
    "kubectl, of want of memory": Report(
        log(
            *prefixed(0, CLOSED),
            "    State:          Terminated",
            "      Reason:       OOMKilled",
            "      Exit Code:    137",
        ),
        ids.OUT_OF_MEMORY,
        (),
        ("OOMKilled",),
        never=(0,),
    ),
    "kubectl, of an exit code": Report(
        log("      Reason:       Error", "      Exit Code:    137"),
        ids.KILLED,
        (),
        ("SIGKILL",),
    ),
    "kubectl, of a container that ended well": Report(
        log(*prefixed(1, *READ_TRACEBACK), "      Exit Code:    0"), ids.EXCEPTION, (1,)
    ),
    "a pod that was evicted": Report(
        log(
            "Message:  The node was low on resource: memory. Threshold quantity: 100Mi"
        ),
        ids.OUT_OF_MEMORY,
        (),
        ("low on resource",),
    ),
    "docker compose": Report(
        log("trainer-1  | loss 3.1", "trainer-1 exited with code 137"),
        ids.KILLED,
        (),
        ("SIGKILL",),
    ),
    "accelerate": Report(
        log(
            "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>."
        ),
        ids.KILLED,
        (),
        ("SIGKILL, says accelerate's launcher",),
    ),
    "a scheduler's line after frames is no exception": Report(
        log(
            *READ_TRACEBACK[:2],
            "srun: error: n1: task 0: Exited with exit code 1",
        ),
        ids.FIRST_FAILURE,
        (),
        ("exit code 1, says Slurm",),
        ("srun: error",),
    ),
}


LOGS = FORMS | {
    "all but one timed out, and the launcher ended that one": Report(
        log(*ALL_BUT_ONE, CLOSING, *table(-6, -15, -6, -6)),
        ids.WAITED_IN_VAIN,
        (),
        (
            (
                "Rank 1 alone had no time-out, and somebody else ended it: most likely"
                " it had not come"
            ),
        ),
    ),
    "one that did not heed SIGTERM": Report(
        log(*ALL_BUT_ONE, CLOSING, *table(-6, -9, -6, -6)),
        ids.WAITED_IN_VAIN,
        (),
        ("Rank 1 alone had no time-out",),
        ("was killed",),
    ),
    "a prefix twice, and what a checkpoint of all ranks passes on": Report(
        log(*in_checkpoint(0), *in_checkpoint(1), *in_checkpoint(2), FAILED),
        ids.EXCEPTION,
        (1,),
        ("No space left", "write (writer.py:12)"),
        never=(0, 2),
    ),
    "a checkpoint's exception without the other rank's traceback": Report(
        log(*in_checkpoint(0)[:4]), ids.EXCEPTION, (1,), ("Rank 1",), never=(0,)
    ),
    "rich": Report(
        log(*prefixed(1, *RICH), FAILED),
        ids.EXCEPTION,
        (1,),
        ("a.wav is empty", "read (data.py:41)"),
    ),
    "loguru": Report(
        log(*prefixed(1, *LOGURU), FAILED),
        ids.EXCEPTION,
        (1,),
        ("a.wav is empty", "read (data.py:41)"),
    ),
    "a rank that was told of the time-out is known": Report(
        log(
            *timed_out(0, 9, "ALLREDUCE", 4096, "3 PG GUID 5"),
            *timed_out(2, 9, "ALLREDUCE", 4096, "3 PG GUID 5"),
            heard(1),
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("rank 1 was told of it",),
        ("nothing is known",),
    ),
    "the recorder's stack explains, and is no look at the rank": Report(
        log(
            *timed_out(5, 40, "ALLTOALL_BASE", 1 << 22, "7 PG GUID 31(experts)"),
            "[rank5]:[E901 07:00:00.500000001 ProcessGroupNCCL.cpp:730] Stack trace of"
            " the failed collective: ",
            f"#0 all_to_all_single from {C10D}:4561",
            "#1 route from /job/moe.py:212",
            heard(0),
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("ALLTOALL_BASE", "number 40 of group 31 (experts)"),
        ("moment", "look again"),
    ),
    "collectives of two groups": Report(
        log(
            *timed_out(0, 3, "ALLREDUCE", 1, "2 PG GUID 3(dp)"),
            *timed_out(1, 60, "_ALLGATHER_BASE", 99, "1 PG GUID 1(fsdp)"),
        ),
        ids.WAITED_IN_VAIN,
        (),
        (
            "Rank 0 in ALLREDUCE of 1, number 3 of group 3 (dp)",
            "rank 1 in _ALLGATHER_BASE",
        ),
        ("nother rank did not come",),
    ),
    "all have enqueued it": Report(
        log(
            "INFO: Starting with 2 processes",
            *timed_out(0, 8, "ALLTOALL_BASE", 56320, "4 PG GUID 9"),
            *timed_out(1, 8, "ALLTOALL_BASE", 76800, "4 PG GUID 9"),
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("All ranks had enqueued it", "56320 on rank 0", "76800 on rank 1"),
        ("did not come",),
    ),
    "sizes that no buffer of a model has": Report(
        log(
            *timed_out(0, 8, "ALLREDUCE", 400_000_000, "0"),
            *timed_out(1, 8, "ALLREDUCE", 250_000_000, "0"),
        ),
        ids.SIZES,
        (),
        ("different sizes", "400000000 on rank 0"),
        ("positional encodings",),
        step="tensor whose size depends on the rank",
    ),
    "unlike models": Report(
        log(
            *prefixed(
                0,
                "Traceback (most recent call last):",
                '  File "/job/train.py", line 9, in main',
            ),
            *prefixed(
                0,
                "RuntimeError: DDP expects same model across all ranks, but Rank 0 has"
                " 12 params, while rank 1 has inconsistent 14 params.",
            ),
        ),
        ids.SIZES,
        (),
        ("14 parameters on rank 1", "12 parameters on rank 0"),
        step="Make the model the same",
    ),
    "nccl2": Report(
        log(
            "E0901 07:00:00 [TC][rank=3][name=dp] Aborting process on rank 3 due to"
            " timeout - watchdog"
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("Rank 3",),
    ),
    "a node that failed": Report(
        log(
            f"{SLURM}NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            "srun: error: Node failure on n9",
        ),
        ids.NODE_FAILED,
        (),
        ("node failure on n9",),
        ("Look who", "no record"),
    ),
    "a node that mpirun has lost": Report(
        log(
            "PRTE has lost communication with a remote daemon.",
            "  HNP daemon   : [prterun-a-1@0,0] on node n1",
            "  Remote daemon: [prterun-a-1@0,3] on node n4",
            "prterun has exited due to process rank 6 with PID 77 on node n4 exiting",
            "improperly. There are three reasons this could occur:",
        ),
        ids.NODE_FAILED,
        (),
        ("node n4",),
    ),
    "a process that ended improperly": Report(
        log(
            "mpirun has exited due to process rank 6 with PID 77 on node n4 exiting",
            "improperly. There are",
        ),
        ids.FIRST_FAILURE,
        (6,),
        ("n4",),
    ),
    "the time limit": Report(
        log(f"{SLURM}TIME LIMIT ***"),
        ids.FIRST_FAILURE,
        (),
        ("time limit", "no hang"),
        ("no record",),
        step="--time",
    ),
    "the time limit of a job that hung": Report(
        log(heard(5), f"{SLURM}TIME LIMIT ***"),
        ids.FIRST_FAILURE,
        (),
        ("time limit", "it hung"),
        ("no record",),
    ),
    "preemption": Report(
        log(f"{SLURM}PREEMPTION ***"),
        ids.FIRST_FAILURE,
        (),
        ("preempted",),
        ("no record",),
        step="checkpoint",
    ),
    "a loader's worker that was killed": Report(
        log(
            *prefixed(
                2,
                "Traceback (most recent call last):",
                '  File "/job/train.py", line 9, in main',
                "RuntimeError: DataLoader worker (pid 31) is killed by signal:"
                " Killed. ",
            )
        ),
        ids.EXCEPTION,
        (2,),
        step="dmesg",
    ),
    "a spawned process": Report(
        log(
            "-- Process 3 terminated with the following error:",
            "Traceback (most recent call last):",
            '  File "/job/train.py", line 9, in main',
            "KeyError: 'lr'",
        ),
        ids.EXCEPTION,
        (),
        ("spawned process 3", "KeyError"),
    ),
    "a worker that died after training had ended": Report(
        log(
            "(RayTrainWorker pid=31, ip=10.0.0.1) INFO Training finished after 3"
            " epochs",
            "ray.exceptions.RayActorError: The actor died unexpectedly before finishing"
            " this task.",
            "\tpid: 31",
        ),
        ids.FIRST_FAILURE,
        (),
        ("pid 31", "after training had come to its end"),
        ("cannot go on",),
    ),
    "processes whose ranks the log tells at its start": Report(
        log(*STARTS, *unhandled(102), *unhandled(101)),
        ids.WAITED_IN_VAIN,
        (),
        ("Ranks 1-2 waited", "one_epoch (engine.py:291)", "nothing is known of rank 0"),
        ("which, is not told",),
    ),
    "a thread that died, and the watchdog's lines behind its traceback": Report(
        log(
            *prefixed(
                1,
                "Exception in thread Thread-4 (_pin_memory_loop):",
                "Traceback (most recent call last):",
                "  File"
                ' "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/pin_memory.py",'
                " line 61, in step",
                "RuntimeError: CUDA error: out of pages",
            ),
            f"{heard(1)[:62]}1743] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a"
            " dump signal due to a collective timeout from  rank 0 and more. Last"
            " enqueued NCCL work: 884, last completed NCCL work: 884.",
            *timed_out(0, 885, "ALLREDUCE", 1, "0 PG GUID 0(default_pg)"),
        ),
        ids.MISSING_RANK,
        (1,),
        ("number 885", "CUDA error: out of pages, in its thread Thread-4"),
        never=(0,),
    ),
    "parameters without a gradient": Report(
        log(
            *prefixed(
                1,
                "Traceback (most recent call last):",
                '  File "/job/train.py", line 9, in main',
                "RuntimeError: Expected to have finished reduction in the prior"
                " iteration before starting a new one. Pass"
                " `find_unused_parameters=True`.",
            )
        ),
        ids.EXCEPTION,
        (1,),
        step="got no gradient",
    ),
    "the peer that NCCL lost": Report(
        log(
            *prefixed(
                0,
                "socketProgress: Connection closed by remote peer"
                " gpu-14.cluster<51234>",
            )
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("closed by gpu-14.cluster<51234>", "Another rank had gone before"),
    ),
    "a start-up without the address": Report(
        log(
            "[W socket.cpp:697] The IPv6 network addresses of (head, 29500) cannot be"
            " retrieved (gai error: -2 - no)",
            "[E socket.cpp:957] The client socket has timed out after 600s while trying"
            " to connect to (head, 29500).",
        ),
        ids.START_UP,
        (),
        ("could not be resolved: head: -2",),
    ),
    "the traceback in torchrun's table, of a function with @record": Report(
        log(
            FAILED.replace("local_rank: 0", "local_rank: 2"),
            "  rank      : 2 (local_rank: 2)",
            "  exitcode  : 1 (pid: 997)",
            "  error_file: /tmp/none_y/attempt_0/2/error.json",
            f"  traceback : {READ_TRACEBACK[0]}",
            *(f"  {one}" for one in READ_TRACEBACK[1:]),
            "",
            "=" * 60,
        ),
        ids.EXCEPTION,
        (2,),
        ("a.wav is empty in read (data.py:41)",),
    ),
    "all that are heard timed out, of a job of unknown size": Report(
        log(
            *timed_out(0, 8, "ALLREDUCE", 70_000, "1 PG GUID 1(dp)"),
            *timed_out(1, 8, "ALLREDUCE", 70_000, "1 PG GUID 1(dp)"),
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("that are heard had enqueued it", "a rank that is not heard has not come"),
        ("ll ranks had enqueued it", "nother rank did not come"),
    ),
    "the peer of an InfiniBand transfer": Report(
        log(
            *prefixed(
                0,
                "ncclRemoteError: A call failed possibly due to a network error",
                "Last error:",
                "NET/IB: Got completion from peer 10.7.8.9<34567> with status=12",
            )
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("closed by 10.7.8.9<34567>",),
    ),
    "Slurm that could not start the job": Report(
        log(
            "srun: error: Task launch for StepId=36.0 failed on node n1: Job credential"
            " expired"
        ),
        ids.FIRST_FAILURE,
        (),
        ("could not start it: Task launch", "n1: Job credential expired"),
    ),
    "a program that Slurm does not find": Report(
        log(
            "slurmstepd: error: execve(): torchrun: No such file or directory",
            "srun: error: n1: task 0: Exited with exit code 2",
        ),
        ids.FIRST_FAILURE,
        (),
        ("could not start it: execve(): torchrun: No such file",),
    ),
    "the worker and its file come first in what a stall line knew": Report(
        log(
            "nemo_patches WARNING [rank 0/2 node1] no step for 60 s. rank 1 (node1, pid"
            " 33): select (selectors.py:415) < train (train.py:28); its data loader's"
            " worker 3 (pid 81) has /data/s.tar open | rank 0: barrier, in save"
            " (train.py:9)"
        ),
        ids.MISSING_RANK,
        (1,),
        (
            (
                "Rank 1: its data loader's worker 3 (pid 81) has /data/s.tar open. It"
                " has not entered barrier of save"
            ),
        ),
    ),
    "the recorder's stack with a prefix": Report(
        log(
            *timed_out(0, 9, "ALLREDUCE", 4096, "3 PG GUID 5"),
            "[rank0]:[E901 07:00:01.0 ProcessGroupNCCL.cpp:682] Stack trace of the"
            " failed collective: ",
            "[rank0]: #0 all_reduce from"
            " /v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2810",
            "[rank0]: #1 step from /job/train.py:50",
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("waited in ALLREDUCE",),
    ),
    "Gloo that could not connect had no time limit": Report(
        log(
            *prefixed(
                2,
                "RuntimeError: Gloo connectFullMesh failed with"
                " [gloo/transport/tcp/pair.cc:144] no error",
            )
        ),
        ids.WAITED_IN_VAIN,
        (),
        ("had a connection closed",),
        ("time limit",),
    ),
    "a loader's worker that the kernel killed is no rank": Report(
        log("[1.2] Memory cgroup out of memory: Killed process 4711 (pt_data_worker)"),
        ids.OUT_OF_MEMORY,
        (),
        ("A process of the job was killed",),
        ("A rank",),
    ),
    "ranks that were only told of a time-out": Report(
        log(heard(1), heard(2)),
        ids.NOT_ENOUGH,
        (),
        (
            (
                "Ranks 1-2 [train.log:1, ...]: it was told of another rank's time-out,"
                " and had none itself"
            ),
        ),
        exit_code=2,
    ),
    "ranks that Ctrl-C ended": Report(
        log(*prefixed(0, *READ_TRACEBACK[:2], "KeyboardInterrupt")),
        ids.NOT_ENOUGH,
        (),
        ("Rank 0 [train.log:3]: somebody ended it (KeyboardInterrupt)",),
        exit_code=2,
    ),
    "a thread that died on a rank that nothing else names": Report(
        log(
            *prefixed(1, "Exception in thread Thread-3 (produce):", *READ_TRACEBACK),
            *timed_out(0, 9, "ALLREDUCE", 4096, "3 PG GUID 5"),
        ),
        ids.WAITED_IN_VAIN,
        (),
        (
            (
                "The log of rank 1 has ValueError: a.wav is empty, in its thread"
                " Thread-3 in read (data.py:41)"
            ),
        ),
    ),
    "ranks as srun -l writes them": Report(
        log(
            *labelled("{}: ", (0, 9), *READ_TRACEBACK),
            "srun: error: n1: task 0: Exited with exit code 1",
            "srun: error: n2: task 9: Exited with exit code 1",
        ),
        ids.EXCEPTION,
        (0, 9),
        ("a.wav is empty",),
    ),
    "a rank as mpirun writes it": Report(
        log(
            *labelled("[1,2]<stderr>:", (2,), *READ_TRACEBACK),
            "mpirun detected that one or more processes exited with non-zero status,"
            " thus causing",
            "the job to be terminated. The first process to do so was:",
            "",
            "  Process name: [[15,1],2]",
            "  Exit code:    1",
        ),
        ids.EXCEPTION,
        (2,),
        ("a.wav is empty",),
    ),
    "prte's first process": Report(
        log("  Process name: [prterun-head-1@1,3]", "  Exit code:    139"),
        ids.FIRST_FAILURE,
        (3,),
        ("SIGSEGV",),
    ),
    "the launcher's kills on other nodes follow from a node's failure": Report(
        log("srun: error: Node failure on gpu05", "srun: error: gpu04: task 0: Killed"),
        ids.NODE_FAILED,
        (),
        ("node failure on gpu05",),
    ),
    "another form of Slurm's line": Report(
        log(
            "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE"
            " TO TIME LIMIT ***"
        ),
        ids.FIRST_FAILURE,
        (),
        ("reached its time limit",),
    ),
    "LSF's time limit": Report(
        log("TERM_RUNLIMIT: job killed after reaching LSF run time limit."),
        ids.FIRST_FAILURE,
        (),
        ("its time limit",),
    ),
    "PBS's time limit": Report(
        log("=>> PBS: job killed: walltime 3615 exceeded limit 3600"),
        ids.FIRST_FAILURE,
        (),
        ("its time limit",),
    ),
    "Slurm's limit of memory": Report(
        log(
            "slurmstepd: error: Step 7.0 exceeded memory limit (66322 > 65536), being"
            " killed"
        ),
        ids.OUT_OF_MEMORY,
    ),
    "srun's abort after the end of training": Report(
        log("Training done", "srun: error: n1: task 0: Aborted"),
        ids.FIRST_FAILURE,
        (),
        ("after training had come",),
    ),
    "a spawned process that ended with an exit code": Report(
        log(
            "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated"
            " with exit code 1"
        ),
        ids.FIRST_FAILURE,
        (),
        ("process 2 terminated with exit code 1",),
    ),
    "a watchdog without a heartbeat": Report(
        log(
            "[rank0]:[F318 10:00:00.0 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID"
            " 0(default_pg) Rank 0] Terminating the process after attempting to dump"
            " debug info, due to ProcessGroupNCCL watchdog hang."
        ),
        ids.STUCK_WATCHDOG,
    ),
    "a network interface that NCCL does not find is the rank's own fault": Report(
        log(
            *prefixed(
                1,
                "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317,"
                " internal error",
                "ncclInternalError: Internal check failed.",
                "Last error:",
                "Bootstrap : no socket interface found",
            )
        ),
        ids.EXCEPTION,
        (1,),
        ("no socket interface found",),
        ("connection closed",),
    ),
    "tracebacks behind the labels of two pods, mixed": Report(
        log(
            *(f"trainer-0  | {one}" for one in READ_TRACEBACK[:2]),
            *(f"pod-1 trainer {one}" for one in READ_TRACEBACK[:2]),
            "trainer-0  | ValueError: a.wav is empty",
            "pod-1 trainer ConnectionResetError: [Errno 104] reset",
            FAILED.replace("local_rank: 0", "local_rank: 3"),
        ),
        ids.EXCEPTION,
        (),
        ("ValueError: a.wav is empty in read (data.py:41)",),
    ),
    "an address that cannot be resolved, and nothing after it": Report(
        log(
            "[W1126 10:00:00.000 socket.cpp:767] [c10d] The IPv6 network addresses of"
            " (head, 29400) cannot be retrieved (gai error: -3 - Temporary failure in"
            " name resolution)."
        ),
        ids.NOT_ENOUGH,
        (),
        ("cannot resolve the address at which the ranks meet (head: -3",),
        exit_code=2,
    ),
    "code that is installed as a package": Report(
        log(*prefixed(1, *IN_PACKAGE), *prefixed(2, *IN_PACKAGE)),
        ids.WAITED_IN_VAIN,
        (),
        ("write_state (finetune.py:745)",),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log(name: str, tmp_path: Path) -> None:
    check(LOGS[name], tmp_path)


def check(report: Report, folder: Path) -> None:
    for file, text in report.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    found = diagnose_logs([folder / file for file in report.files])
    first = found.findings[0]
    assert (first.id, first.ranks, found.exit_code) == (
        report.id,
        report.ranks,
        report.exit_code,
    ), found
    for words in report.said:
        assert words in found.verdict, found
    for words in report.unsaid:
        assert words not in found.verdict + found.next_step, found
    assert report.step in found.next_step, found
    assert not {rank for one in found.findings for rank in one.ranks} & set(
        report.never
    ), found


@pytest.mark.parametrize("name", LOGS)
def test_the_lines_that_decide_pass_the_filter_before_the_patterns(
    name: str, tmp_path: Path
) -> None:
    """Lines are filtered by words before any pattern sees them, some at a time: far from each other
    all must pass.
    """
    padding = "\n" + "step 1 of 2, loss 0.5\n" * 2000
    [(file, text)] = LOGS[name].files.items()
    begins = (
        "[rank",
        "E0901",
        "slurmstepd",
        "srun",
        "-- Process",
        "Unhandled",
        "INFO",
        "(Ray",
        "mpirun",
        "PRTE",
        "ray.",
    )
    parts = text.splitlines(keepends=True)
    apart = "".join(
        (padding if part.startswith(begins) and not part.startswith("[rank") else "")
        + part
        for part in parts
    )
    assert logs.recognises(file, apart.encode())
    check(replace(LOGS[name], files={file: apart}, step="", never=()), tmp_path)


# A frame, a chain's error and our own line, which nothing ends, are not put together again.
NOT_JOINED = {
    "times of containers before the launcher's labels",
    "a checkpoint's exception without the other rank's traceback",
    "the worker and its file come first in what a stall line knew",
}


@pytest.mark.parametrize(
    "name", [name for name in LOGS if "JSON" not in name and name not in NOT_JOINED]
)
def test_a_log_that_a_terminal_has_wrapped_at_90_columns(
    name: str, tmp_path: Path
) -> None:
    """As `tmux` or a pasted terminal has it, in the middle of words."""
    [(file, text)] = LOGS[name].files.items()
    wrapped = "\n".join(
        line[at : at + 90]
        for line in text.split("\n")
        for at in range(0, max(len(line), 1), 90)
    )
    whole = LOGS[name]
    check(replace(whole, files={file: wrapped}, said="", step="", unsaid=""), tmp_path)


def py_spy(pid: int, *threads: str, command: str = "python train.py") -> str:
    return (
        f"Process {pid}: {command}\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        + "\n".join(threads)
        + "\n"
    )


def main_thread(pid: int, *frames: str) -> str:
    return "\n".join(
        [
            f'Thread {pid} (idle): "MainThread"',
            *(f"    {one}" for one in (*frames, "main (train.py:80)")),
        ]
    )


def hook(*frames: str) -> str:
    return "\n".join(["Thread 9001 (active)", *(f"    {one}" for one in frames)])


BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:768)",
    "backward (torch/_tensor.py:522)",
)
GATHER = "all_gather_into_tensor (torch/distributed/distributed_c10d.py:2709)"
SCATTER = "reduce_scatter_tensor (torch/distributed/distributed_c10d.py:3100)"
READS = "read_table (my_hooks.py:7)"
ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
LOADER = (
    "select (selectors.py:415)",
    "get (multiprocessing/queues.py:107)",
    "_try_get_data (torch/utils/data/dataloader.py:990)",
    "__next__ (torch/utils/data/dataloader.py:521)",
)


def in_backward(pid: int, *frames: str) -> str:
    return py_spy(
        pid, main_thread(pid, *BACKWARD), hook(*frames, "unshard (my_hooks.py:41)")
    )


def as_json(pid: int, frame: str) -> str:
    name, _, place = frame.partition(" (")
    file, _, line = place.rstrip(")").rpartition(":")
    told = {"name": name, "filename": file, "line": int(line)}
    thread = {"pid": pid, "os_thread_id": pid, "owns_gil": False, "frames": [told]}
    return json.dumps([thread])


def of_two_hosts(form: str, reads: int) -> dict[str, str]:
    """One file of both hosts' stacks, each line behind its host's label; one of them reads."""
    lines: list[str] = []
    for host in (1, 2):
        stack = py_spy(50, main_thread(50, READS if host == reads else ALL_REDUCE))
        lines += labelled(form, (host,), *stack.splitlines(keepends=True))
    return {"all.txt": "".join(lines)}


def pystack(*frames: tuple[str, int, str]) -> str:
    lines = [
        f'    (Python) File "{file}", line {line}, in {function}\n        call()'
        for file, line, function in frames
    ]
    head = "Traceback for thread 140 (python) [] (most recent call last):"
    return "\n".join([head, *lines, ""])


def loop(*frames: tuple[str, int, str, str]) -> str:
    """As a loop over sys._current_frames() prints it."""
    lines = [
        f'File: "{file}", line {line}, in {function}\n  {text}'
        for file, line, function, text in frames
    ]
    return "\n".join(["# Thread: MainThread(140)", *lines, ""])


SPY = "dump-1.txt"
STACKS = {
    "unlike collectives in autograd's threads": Report(
        {
            f"rank{rank}.txt": in_backward(50 + rank, SCATTER if rank == 1 else GATHER)
            for rank in range(3)
        },
        ids.OUT_OF_STEP,
        (),
        ("rank 1 in reduce_scatter_tensor", "ranks 0, 2 in all_gather_into_tensor"),
        ("No rank is missing",),
    ),
    "one that reads a file in autograd's thread": Report(
        {
            f"rank{rank}.txt": in_backward(50 + rank, READS if rank == 1 else GATHER)
            for rank in range(3)
        },
        ids.MISSING_RANK,
        (1,),
        ("read_table (my_hooks.py:7)",),
        never=(0, 2),
    ),
    "several processes in one file": Report(
        {
            "hang_0924.txt": (
                in_backward(50, GATHER)
                + in_backward(51, READS)
                + in_backward(52, GATHER)
            )
        },
        ids.MISSING_RANK,
        (1,),
    ),
    "several processes in a file with a small number": Report(
        {SPY: in_backward(50, READS) + in_backward(51, GATHER)}, ids.MISSING_RANK, (0,)
    ),
    "headings between the stacks, in another order": Report(
        {
            "all.txt": "".join(
                f"{mark} {rank}\n"
                + in_backward(50 + rank, READS if rank == 2 else GATHER)
                for mark, rank in (("##### Rank", 2), ("--- rank", 0), ("rank", 1))
            )
        },
        ids.MISSING_RANK,
        (2,),
        never=(0, 1),
    ),
    "two files with looks at the same processes": Report(
        {
            f"dump-{look}.txt": in_backward(50, READS) + in_backward(51, GATHER)
            for look in (1, 2)
        },
        ids.MISSING_RANK,
        (0,),
        never=(1, 2, 3),
    ),
    "several processes' JSON in one file": Report(
        {
            "dump.json": "\n".join(
                as_json(50 + rank, READS if rank == 1 else ALL_REDUCE)
                for rank in range(3)
            )
        },
        ids.MISSING_RANK,
        (1,),
        never=(0, 2),
    ),
    "containers of two hosts have the same process ids": Report(
        {
            f"node-{host}.txt": py_spy(50, main_thread(50, ALL_REDUCE))
            + py_spy(51, main_thread(51, READS if host == 1 else ALL_REDUCE))
            for host in range(2)
        },
        ids.MISSING_RANK,
        (3,),
        unsaid=("it works",),
        never=(0, 1, 2),
    ),
    "behind the labels of pdsh": Report(
        of_two_hosts("cn{}: ", reads=2),
        ids.MISSING_RANK,
        (1,),
        never=(0,),
    ),
    "behind the labels of kubectl": Report(
        of_two_hosts("[pod/worker-{}/job] ", reads=1),
        ids.MISSING_RANK,
        (0,),
        never=(1,),
    ),
    "pystack": Report(
        {
            "rank0.txt": pystack(
                ("/job/train.py", 80, "main"), (C10D, 2501, "all_reduce")
            ),
            "rank1.txt": pystack(
                ("/job/train.py", 80, "main"), ("/job/data.py", 41, "read")
            ),
        },
        ids.MISSING_RANK,
        (1,),
        ("read (data.py:41) < main (train.py:80)",),
        never=(0,),
    ),
    "a worker that only the stall line knows": Report(
        {
            "rank1.txt": py_spy(33, main_thread(33, *LOADER)),
            "train.log": (
                "nemo_patches WARNING [rank 0/2 node1] no step for 60 s. rank 1 (node1,"
                " pid 33): select (selectors.py:415) < main (train.py:80); its data"
                " loader's worker 3 (pid 81) has /data/s.tar open | rank 0: barrier, in"
                " save (train.py:9)\n"
            ),
        },
        ids.MISSING_RANK,
        (1,),
        ("worker 3 (pid 81) has /data/s.tar open",),
    ),
    "the ranks by the names of their logs, and a traceback of one": Report(
        {
            f"nemo_log_globalrank-{rank}_localrank-0.txt": "\n".join(
                READ_TRACEBACK if rank == 1 else IN_PACKAGE
            )
            for rank in range(3)
        },
        ids.WAITED_IN_VAIN,
        (),
        (
            "Ranks 0, 2 waited for others in barrier",
            "The log of rank 1 has a traceback, which may have been caught: ValueError",
            "a.wav is empty in read",
        ),
        ("nothing is known",),
    ),
    "the stall lines of ranks whose logs have their names": Report(
        {
            f"rank{rank}.log": (
                f"nemo_patches WARNING [rank {rank}/2 n{rank}] no step for 60 s. rank 1 (n1,"
                " pid 33): read (data.py:41) < main (train.py:80) | rank 0 (n0, pid 32):"
                " barrier, in save (train.py:9)\n"
            )
            * 2
            for rank in range(2)
        },
        ids.MISSING_RANK,
        (1,),
        ("read (data.py:41)",),
        never=(0,),
    ),
    "the names of nodes are no ranks": Report(
        {
            f"node_rank_{node}.log": "\n".join(READ_TRACEBACK if node else IN_PACKAGE)
            for node in range(2)
        },
        ids.WAITED_IN_VAIN,
        (),
        unsaid=("ank 0", "ank 1"),
    ),
    "local ranks by the names of the logs of two hosts": Report(
        {f"n{host}/rank_{rank}.log": GLOO for host in (1, 2) for rank in (0, 1)},
        ids.WAITED_IN_VAIN,
        (),
        ("A rank (which, is not told) waited",),
    ),
    "the local rank in the command": Report(
        {
            "all.txt": "".join(
                py_spy(
                    60 + rank,
                    main_thread(60 + rank, READS if rank == 1 else ALL_REDUCE),
                    command=f"python a.py --local_rank={rank}",
                )
                for rank in (1, 2, 0)
            )
        },
        ids.MISSING_RANK,
        (1,),
    ),
    "a launcher and a loader's worker in the file are no ranks": Report(
        {
            "hang.txt": (
                py_spy(
                    40,
                    main_thread(
                        40,
                        "_invoke_run"
                        " (torch/distributed/elastic/agent/server/api.py:868)",
                    ),
                )
                + py_spy(50, main_thread(50, *LOADER))
                + py_spy(
                    70,
                    main_thread(
                        70,
                        "open_slowly (corpus.py:9)",
                        "_worker_loop (torch/utils/data/_utils/worker.py:349)",
                    ),
                )
                + py_spy(51, main_thread(51, ALL_REDUCE))
            )
        },
        ids.MISSING_RANK,
        (0,),
        ("a worker (pid 70) is in open_slowly (corpus.py:9)",),
        never=(1, 2, 3),
    ),
    "nobody in a collective": Report(
        {
            "rank0.txt": py_spy(50, main_thread(50, *LOADER)),
            "rank1.txt": py_spy(
                51, main_thread(51, "backward (torch/autograd/__init__.py:197)")
            ),
        },
        ids.NOT_ENOUGH,
        (),
        ("rank 0: it waits for its data loader",),
        ("nothing that decides",),
        exit_code=2,
    ),
    "a loop over all threads' frames": Report(
        {
            "rank0.txt": loop(
                ("/job/train.py", 80, "main", "go()"),
                (C10D, 9, "barrier", "work.wait()"),
            ),
            "rank1.txt": loop(("/job/train.py", 81, "main", "dist.all_reduce(done)")),
        },
        ids.OUT_OF_STEP,
        (),
        ("Rank 0 in barrier", "rank 1 in all_reduce"),
    ),
}


def dumped(rank: int, pid: int) -> list[str]:
    """Of ranks of which the one with number 1 reads a file."""
    place = READS if rank == 1 else ALL_REDUCE
    return py_spy(pid, main_thread(pid, place)).splitlines()


STACKS |= {
    f"three processes, told apart by {name}": Report(
        log(*lines), ids.MISSING_RANK, (1,), ("read_table (my_hooks.py:7)",)
    )
    for name, lines in {
        "their pids, beneath a container's times": stamped(
            CONTAINERS, *(line for rank in range(3) for line in dumped(rank, 70 + rank))
        ),
        "labels in JSON": in_json(
            *(
                f"[default{rank}]:{line}"
                for rank in range(3)
                for line in dumped(rank, 7)
            )
        ),
        "headings with a pod": [
            line
            for rank in range(3)
            for line in (f"=== pod-{rank} ===", *dumped(rank, 7))
        ],
        "headings of tail": [
            line
            for rank in range(3)
            for line in (f"==> out/rank_{rank}.txt <==", *dumped(rank, 7))
        ],
    }.items()
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name: str, tmp_path: Path) -> None:
    check(STACKS[name], tmp_path)


def test_the_recorders_stack_with_a_prefix_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        LOGS["the recorder's stack with a prefix"].files["train.log"]
    )
    evidence = Evidence()
    logs.read([tmp_path / "train.log"], evidence)
    places = [
        one.value.where for one in evidence.facts if isinstance(one.value, Condition)
    ]
    assert "all_reduce (distributed_c10d.py:2810) < step (train.py:50)" in places


def test_a_stall_report_tells_the_worker_first() -> None:
    states = ("worker 3 (pid 81) has /data/s.tar open", "worker 4 (pid 82) computes")
    group = ReportedGroup(
        (1,),
        "elsewhere",
        "n1",
        7,
        5,
        60.0,
        "select (selectors.py:415)",
        "",
        worker_states=states,
    )
    assert (
        group.place.worker == "its data loader's worker 3 (pid 81) has /data/s.tar open"
    )
    assert group.place.details == ("its data loader's worker 4 (pid 82) computes",)


def test_a_thread_is_told_of_the_rank_that_has_it(tmp_path: Path) -> None:
    """And of no other one that stands at the same place."""
    watcher = (
        '\nThread 9 (idle): "watcher"\n    poll (my_watch.py:3)\n    _bootstrap'
        " (threading.py:973)"
    )
    for rank in range(3):
        threads = main_thread(50 + rank, "compute (train.py:9)") + (
            watcher if rank == 2 else ""
        )
        (tmp_path / f"rank{rank}.txt").write_text(py_spy(50 + rank, threads))
    evidence = diagnose_logs(sorted(tmp_path.iterdir())).findings[0].evidence
    [told] = [line for line in evidence if "watcher" in line]
    assert "rank 2" in told
