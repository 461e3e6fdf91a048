"""Logs in words that no table has: general rows, labels that are learned, and what is told beside a
verdict. Harmless ones are among them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diagnosing import report_of

from nemo_patches.tools.diagnose.findings import NOT_ENOUGH

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {}


def case(
    name: str, text: str, must: object = (), mustnot: object = (), file: str = ""
) -> None:
    CASES[name] = (text, tuple(must), tuple(mustnot))  # type: ignore[arg-type]


GL = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete"
case(
    "spot-preempt k8s",
    "\n".join(
        [f"trainer-{i} | step 10 loss 2.1" for i in (0, 1, 2, 3)] * 3
        + [
            "trainer-2 | Traceback (most recent call last):",
            'trainer-2 |   File "/app/data.py", line 41, in read',
            "trainer-2 | ValueError: bad audio header",
        ]
    ),
    ["(?i)rank 2 raised ValueError"],
)
case(
    "rank eq pipes",
    "\n".join(f"[rank={i}] || start step {s}" for s in range(4) for i in (1, 0, 2))
    + "\n"
    + "\n".join(
        f'[rank={i}] || Traceback (most recent call last):\n[rank={i}] ||   File "/a/train.py", line 9, in step\n[rank={i}] || {GL}'
        for i in (0, 2)
    ),
    ["[Rr]anks 0, 2 waited"],
    ["(?i)rank 1 (was|raised)"],
)
case(
    "elastic agent words",
    "supervisor: worker 3 exited with exit code -7\nsupervisor: stopping others\n",
    ["[Rr]ank 3", "exit code -7"],
)
case(
    "monitor unresponsive",
    "2026-11-28 03:11:02 WARN heartbeat-monitor: rank 5 is unresponsive for 312 s (last step 8812)\n",
    ["[Rr]ank 5", "unresponsive"],
)
case(
    "missing ranks words",
    "watcher: missing ranks 2, 6 at barrier 'epoch_end' after 600s\n",
    ["[Rr]anks 2, 6"],
)
case(
    "harmless exit 0",
    "launcher: worker 0 exited with code 0\nlauncher: worker 1 exited with code 0\nTraining finished\n",
    [],
    [r"(?i)rank \d+ (ended|is not there|was killed)"],
)
case(
    "harmless state dict",
    "Missing keys: rank_embed.0.weight, task 3 missing\nEpoch 1: loss 3\n",
    [],
    ["missing-rank", "killed"],
)
case(
    "harmless not",
    "health: rank 3 is not stuck, continuing\nhealth: no rank is missing\n",
    [],
    ["[Rr]ank 3 is not there"],
)
case(
    "harmless epochs",
    "\n".join(f"Epoch {e}: train loss {1 / (e + 1)}" for e in range(9)),
    [],
    ["missing-rank", "exception:"],
)
case(
    "epoch with traceback",
    "\n".join(f"Epoch {e}: train loss {1 / (e + 1)}" for e in range(4))
    + "\nTraceback (most recent call last):\n  File \"/a/t.py\", line 3, in f\nKeyError: 'x'\n",
    [],
    ["[Rr]ank [0-3] raised"],
)
case(
    "nvlink",
    "[node-b] kernel: NVRM: Xid (PCI:0000:3b:00): 74, pid=1, NVLink: fatal error detected on link 4\n"
    + "\n".join(
        f"[rank{r}]:[E1128 03:00:0{r}.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
        for r in range(4)
    ),
    ["NVLink|Xid"],
    [r"[Rr]ank \d has not entered"],
)
case(
    "nfs hint",
    "kernel: nfs: server 10.0.0.9 not responding, still trying\n"
    + "\n".join(
        f"[rank{r}]:[E1128 03:00:0{r}.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
        for r in range(4)
    ),
    ["nfs"],
)
case(
    "torch 2.4 global",
    "\n".join(
        f"[rank{r}]:[E909 08:20:{r:02}.1 ProcessGroupNCCL.cpp:1375] [PG 0 (default_pg) Rank {r}] Received a global timeout from another rank and will start to dump the debug info. Last enqueued NCCL work: {n}, last completed NCCL work: {n}."
        for r, n in ((0, 11), (1, 11), (3, 10))
    )
    + "\n[rank2]:[E909 08:20:00.1 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600000 milliseconds before timing out.",
    ["rank 2|Rank 2"],
    ["[Rr]ank 2 has not"],
)
case(
    "default tee",
    "\n".join(
        f"[default{r}]:[rank{r}]: Traceback (most recent call last):\n[default{r}]:[rank{r}]:   File \"/a/t.py\", line 3, in f\n[default{r}]:[rank{r}]: KeyError: 'speaker'"
        for r in (2,)
    ),
    ["[Rr]ank 2 raised KeyError"],
)
case(
    "vllm tp",
    '(Worker_TP3 pid=411) ERROR 11-28 03:00:00 [multiproc_executor.py:559] Traceback (most recent call last):\n(Worker_TP3 pid=411) ERROR 11-28 03:00:00 [multiproc_executor.py:559]   File "/a/t.py", line 3, in f\n(Worker_TP3 pid=411) ERROR 11-28 03:00:00 [multiproc_executor.py:559] ValueError: no audio\n',
    ["[Rr]ank 3 raised ValueError"],
)
case(
    "srun oom",
    "2026-11-28 18:46:13,278 nemo_patches WARNING [rank 0/2 vm] no encoder call for 40 s. rank 1 (vm, pid 11): computes but takes no step, now in load (a.py:3) | rank 0 (vm, pid 13): backward, which reduces the gradients, in step (train.py:9)\nslurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.\nsrun: error: vm: task 1: Out Of Memory\n",
    ["[Rr]ank 1 was killed|[Rr]ank 1.{0,40}memory"],
    ["may come"],
)
case(
    "ras two behind",
    "#0-0 (fa93daea854b060b) MISMATCH\n  Communicator ranks have different AllGather operation counts\n  62 ranks have launched up to operation 88\n  2 ranks have launched up to operation 87\n  Rank 3 -- GPU 3 managed by process 35 on node 10.0.0.24\n  Rank 9 -- GPU 1 managed by process 36 on node 10.0.0.25\n",
    ["[Rr]anks 3, 9"],
    file="ras.txt",
)
case(
    "hccl tag",
    "EI0002: [PID: 77] 2025-10-11-15:09:30.713.335 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank: [7]. base information: [streamID:[1], taskID[3], taskType[Notify Wait], tag[Broadcast_x]",
    ["[Rr]ank 7"],
)
case(
    "accelerate word",
    "accelerate launcher: process 2 died unexpectedly (signal 9)\n",
    ["[Rr]ank 2"],
)
case(
    "node crashed",
    "control-plane: node 12 crashed, rescheduling\n",
    ["node 12 crashed"],
    ["[Rr]ank 12"],
)
case(
    "task killed", "flyte: task 4 was killed by the kubelet (Evicted)\n", ["[Rr]ank 4"]
)
case(
    "dl worker harmless",
    "DataLoader worker 3 exited unexpectedly but was restarted\nstep 4 ok\n",
    [],
    ["[Rr]ank 3 (ended|is)"],
)
case(
    "rank own words",
    "watcher: rank 1 is missing\n[rank1]:[E1128 03:00:01.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
    ["[Rr]ank 1 waited"],
    ["[Rr]ank 1 is not there"],
)
case(
    "angle labels",
    "\n".join(
        f"<{i}> epoch {s} batch {s * 7} loss 1.0"
        for s in range(5)
        for i in (2, 0, 3, 1)
    )
    + '\n<1> Traceback (most recent call last):\n<1>   File "/a/t.py", line 3, in f\n<1> FileNotFoundError: /data/x.wav\n',
    ["[Rr]ank 1 raised FileNotFoundError"],
)


WD = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}, OpType={op}, NumelIn={s}, NumelOut={s}, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."


def wd(r, n=52, op="ALLREDUCE", s=9, pre=""):
    return f"{pre}[rank{r}]:[E1128 03:00:0{r % 9}.1 ProcessGroupNCCL.cpp:632] [Rank {r}] {WD.format(n=n, op=op, s=s)}"


case(
    "skypilot",
    "\n".join(
        f"(worker{i}, rank={i}, pid=41{i}, ip=10.0.0.{i}) step {s} loss 2"
        for s in range(4)
        for i in (1, 0, 2)
    )
    + '\n(worker2, rank=2, pid=412, ip=10.0.0.2) Traceback (most recent call last):\n(worker2, rank=2, pid=412, ip=10.0.0.2)   File "/a/t.py", line 3, in f\n(worker2, rank=2, pid=412, ip=10.0.0.2) OSError: [Errno 5] Input/output error',
    ["[Rr]ank 2 raised OSError"],
)
case(
    "determined",
    "\n".join(
        f"[2026-11-28T03:0{s}:0{i}Z] [rank={i}] INFO: batch {s}"
        for s in range(4)
        for i in (1, 0, 3, 2)
    )
    + "\n[2026-11-28T03:09:00Z] [rank=3] Traceback (most recent call last):\n[2026-11-28T03:09:00Z] [rank=3]   File \"/a/t.py\", line 3, in f\n[2026-11-28T03:09:00Z] [rank=3] KeyError: 'x'",
    ["[Rr]ank 3 raised KeyError"],
)
case(
    "job agent exit",
    "agent: Rank 6 terminated with exit code 139 (SIGSEGV)\nagent: killing remaining ranks\n",
    ["[Rr]ank 6"],
    ["[Rr]ank 139"],
)
case(
    "watchdog + gone words",
    wd(0)
    + "\n"
    + wd(1)
    + "\n"
    + wd(3)
    + "\ncluster-monitor: task 2 stopped responding: no heartbeat for 900 s\n",
    ["[Rr]ank 2", "no heartbeat"],
)
case(
    "harmless recovered",
    "cluster-monitor: worker 4 was unresponsive for 12 s, recovered\nstep 10 ok\n",
    [],
    ["[Rr]ank 4 is not there"],
)
case(
    "harmless gpu idle",
    "\n".join(f"[GPU {g}] util 99% mem 70%" for g in (1, 0, 2, 3) * 4),
    [],
    ["missing-rank", r"[Rr]ank \d"],
)
case(
    "harmless resume",
    "Resuming from step 100: restoring rank 0..7 states\nrank 0 loaded; rank 1 loaded\nTraining done\n",
    [],
    ["is not there", "ended, by"],
)
case(
    "harmless question",
    "If worker 3 died you will see it here. Tip: run nvidia-smi when a rank is stuck.\n",
    [],
    ["[Rr]ank 3 ended"],
)
case(
    "mosaic",
    "ERROR:composer.cli.launcher:Rank 5 crashed with exit code -9.\nWaiting up to 30 seconds for all training processes to terminate.\n",
    ["[Rr]ank 5"],
)
case(
    "horovod stall",
    "[2026-11-28 03:00:00.1: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock.\nMissing ranks:\n3: [allreduce.noname.7]\n",
    ["[Rr]ank 3: it had not come"],
)
case(
    "k8s labels with clean",
    "\n".join(f"worker-{i} epoch {e} done" for e in range(3) for i in (1, 0)),
    [],
    ["missing-rank", "is not there"],
)
case(
    "ecc",
    "kernel: NVRM: Xid (PCI:0000:81:00): 48, pid=2, Double Bit ECC Error\n"
    + "\n".join(wd(r) for r in range(4)),
    ["Double Bit ECC|Xid"],
    ["has not entered"],
)
case(
    "pipe in tqdm",
    "\n".join(f"Epoch 0:  {p}%|###   | {p}/100 [00:01<00:09]" for p in range(0, 90, 7))
    + "\n"
    + wd(1)
    + "\n"
    + wd(0),
    ["[Rr]anks 0-1 waited"],
    ["has not entered"],
)
case(
    "brackets times",
    "\n".join(f"[{i}] worker ready" for i in (0, 2, 1, 3))
    + "\n"
    + "\n".join(f"[{i}] step {s}" for s in range(3) for i in (2, 0, 3, 1))
    + '\n[3] Traceback (most recent call last):\n[3]   File "/a/t.py", line 9, in g\n[3] ValueError: empty cut',
    ["[Rr]ank 3 raised ValueError"],
)
case(
    "deadlock slurm tasks",
    "srun: error: node7: task 5: Exited with exit code 1\nsrun: Terminating StepId=1.0\n",
    ["task 5"],
)
case("pdsh", "node3: worker 9 killed (signal 9)\n", ["[Rr]ank 9"])
case(
    "spam retry",
    "rank 2: connection lost, retrying (1/5)\nrank 2: reconnected\nTrainer done\n",
    [],
    ["[Rr]ank 2 is not there"],
)


case(
    "torchx replica",
    "\n".join(f"trainer/{i} step {s}" for s in range(4) for i in (2, 1, 0))
    + '\ntrainer/1 Traceback (most recent call last):\ntrainer/1   File "/a/t.py", line 3, in f\ntrainer/1 ValueError: nan loss',
    ["ValueError: nan loss"],
    ["rank 0 raised"],
)
case(
    "dead worker list",
    "orchestrator: lost workers 4, 5 (no heartbeat 300s)\n",
    ["[Rr]anks 4-5|[Rr]anks 4, 5"],
)
case("exit -11", "pool: process 1 exit code: -11\n", ["[Rr]ank 1"])
case(
    "harmless shutdown",
    "rank 0: shutting down\nrank 1: shutting down\nProcess 0 finished with exit code 0\n",
    [],
    ["is not there", "ended, by", "was killed"],
)
case(
    "harmless metric",
    "task 2 error rate 0.1, rank 5 in leaderboard, worker 3 killed 4 bugs\n",
    [],
    ["was killed", "[Rr]ank 3 ended"],
)
case(
    "evicted pod",
    "kubelet: pod trainer-3 evicted: node was low on resource: memory\n",
    ["memory"],
)
case(
    "stalled",
    "2026-11-28 alert[hang]: task=7 stalled since 03:10 (backward)\n",
    ["[Rr]ank 7"],
)
case(
    "no heartbeat prefix",
    "[coordinator] worker#2: no heartbeat for 120s; marking dead\n",
    ["[Rr]ank 2"],
)
case(
    "unpaired",
    "rank 1 crashed\n[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/a/t.py\", line 3, in f\n[rank1]: KeyError: 'z'",
    ["[Rr]ank 1 raised KeyError"],
)
case(
    "nccl2 abort",
    "[TC][rank=3][name=default] Aborting process on rank 3 due to timeout - foo\n",
    ["[Rr]ank 3 waited"],
)
case(
    "harmless wait",
    "rank 0 is waiting for rank 3; rank 3 not stuck\n",
    [],
    ["[Rr]ank 3 is not there", "[Rr]ank 0 is not there"],
)


ENCODER = "".join(
    f"[rank{rank}] step 41: About to call encoder\n[rank{rank}] step 41: encoder completed\n"
    for rank in (0, 2, 1)
)
case(
    "prints: one did not call the encoder again",
    ENCODER
    + "[rank0] step 42: About to call encoder\n[rank2] step 42: About to call encoder\n",
    [
        r'guess.*ranks 0, 2 \("step 42: About to call encoder" \[train.log:7\]\) called',
        r'rank 1 \("step 41: encoder completed" \[train.log:6\]\) did not call it again',
        "only slow",
    ],
)
case(
    "prints: one did not come out of it",
    ENCODER.replace("[rank1] step 41: encoder completed\n", ""),
    [
        r"guess.*rank 1 \(.*\) called the encoder and did not come out of it, as ranks 0, 2"
    ],
)
case(
    "prints: none came out of it",
    "Rank 0: about to call encoder\nRank 1: about to call encoder\n",
    ["guess.*ranks 0-1 .*, all that print, called the encoder, and none came out"],
)
case("prints: all came out", ENCODER, ["Nothing is recognised"], ["guess"])
case(
    "prints: training has ended",
    ENCODER + "[rank0] About to call encoder\nTraining finished\n",
    [],
    ["guess"],
)
case(
    "prints: times",
    "[rank0] time before encoder: 1.2 s\n[rank1] time before encoder: 1.3 s\n"
    "[rank0] after encoder: 2\n",
    [],
    ["guess"],
)
# Words between the rank and what became of it that change neither.
for position, line in enumerate(
    (
        "[pod/w-2/main] 08:01:10 rank 3 process was killed by signal 9 (SIGKILL)",
        "[watch] rank 3 (host gpu7, pid 4411) has not reported for 300 s",
        "launcher: task 3 on node n7 exited with code 137",
        "[guard] rank 3 training progress stalled for 900s, dumping",
        "guard: rank 3 GPU is stuck in kernel nccl for 601 s",
        "coordinator: worker 3's heartbeat timed out (last 120 s ago)",
        "watcher: rank 3 of 8 stopped sending heartbeats",
    )
):
    case(f"rank 3, {position}", line, ["[Rr]ank 3", re.escape(line[-20:])])
case(
    "Ray tells which process is which rank",
    "(TorchTrainer pid=812) - (node_id=dd44, ip=10.0.3.7, pid=904) world_rank=3, local_rank=0\n"
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this"
    " task.\n\tpid: 904\n",
    ["[Rr]ank 3"],
)
case(
    "Ray: a node",
    "(raylet) The node with node id: dd44 and address: 10.0.3.7 and node name: 10.0.3.7 has"
    " been marked dead because the detector has missed too many heartbeats from it.\n",
    ["node of the job failed", "10.0.3.7"],
)
case(
    "whom others ended is no reason",
    "launcher:Rank 3 crashed with exit code -6.\n"
    + "".join(
        f"Global rank {rank} (PID 21{rank}) exited with code -15\n"
        for rank in (0, 1, 2)
    ),
    ["Rank 3 ended"],
)
case(
    "a rank in brackets, a time and a level",
    "[2026-11-28 03:00:00][rank2][ERROR] Traceback (most recent call last):\n"
    '[2026-11-28 03:00:00][rank2][ERROR]   File "t.py", line 3, in f\n'
    "[2026-11-28 03:00:00][rank2][ERROR] ZeroDivisionError: division by zero\n"
    "[2026-11-28 03:00:00][rank0][INFO] step\n",
    ["Rank 2 raised ZeroDivisionError"],
)
# Harmless: another subject, what was, what was said, what somebody sees to.
for position, line in enumerate(
    (
        "reference:the rank 3 process died suddenly and node 2 is missing",
        '{"audio_filepath": "a.wav", "text": "worker 3 was killed by a train"}',
        "Resuming: previous attempt ended since worker 3 crashed with exit code 1",
        "INFO: resumed from checkpoint after rank 3 crashed in run 1 (see run_1.log)",
        "Rank 3: prefetch queue stalled for 2.1s, continuing",
        "Rank 3: shard cache missing, rebuilding",
        "rank 3 missing optional dependency apex",
        "wandb: ERROR Error while calling W&B API: rank 3 entity missing",
        "pre-commit: process 211 exited with code 1 (ignored)",
        "pool: worker 3 died, restarting it",
        "[monitor] rank 3 unresponsive for 60 s\n[rank3]: step 101\n",
        "[monitor] rank 3 unresponsive for 60 s\n[monitor] rank 3 is back",
        "node 3 fan missing sensor",
        "worker 3 silent mode on",
        "rank 3 stuck at loss 0.69 for 3 epochs",
        "task 3 aborted by user request, task 4 started",
        "rank 3 missing=0 stalled=0 dead=0",
        "rank 3 did not report metrics for this step (val only)",
        "rank 3 hung out the washing",
        "monitor: rank 3 is killed after 3 missed heartbeats (config)",
        "INFO: task 3 killed (speculative copy finished first)",
        "sample 12: 'the rank 3 worker was killed'",
        "timeout_s: 600  # rank 3 stuck for 600 s -> kill",
        "stalled ranks 3",
        "lagging ranks: 3 of 8",
        "lost workers: 3, restarted 3",
        "rank 3 exited with code -15",
    )
):
    case(
        f"harmless, {position}",
        line,
        ["Nothing is recognised|went on|nothing that decides"],
        ["[Rr]ank 3 (is|ended|was)", "211"],
    )


@pytest.mark.parametrize("name", CASES)
def test_a_log_in_other_words(name: str, tmp_path: Path) -> None:
    text, must, mustnot = CASES[name]
    (tmp_path / "train.log").write_text(text)
    found = report_of(tmp_path / "train.log")
    said = "\n".join(
        [found.verdict, *(f"{one.id}: {one.text}" for one in found.findings)]
    )
    assert not [one for one in must if not re.search(one, said)], said
    assert not [one for one in mustnot if re.search(one, said)], said
    if "guess" in said:
        assert not any(one.ranks for one in found.findings)


EXAMPLES = Path(__file__).with_name("logs") / "other_words.txt"


def examples() -> dict[str, tuple[str, dict[str, str], str]]:
    """By name: whom it accuses, or that it is harmless; what is said, and what not; the log."""
    found = {}
    for one in EXAMPLES.read_text().split("\n=== [")[1:]:
        head, _, log = one.partition("\n")
        kind, _, name = head.partition("] ")
        said = {}
        while log.startswith(("says: ", "not: ")):
            line, _, log = log.partition("\n")
            key, _, said[key] = line.partition(": ")
        found[name] = kind, said, log
    return found


@pytest.mark.parametrize("name", examples())
def test_examples(name: str, tmp_path: Path) -> None:
    kind, patterns, log = examples()[name]
    (tmp_path / "train.log").write_text(log)
    found = report_of(tmp_path / "train.log")
    said = "\n".join([found.verdict, *(one.text for one in found.findings)])
    first, *_ = [*(set(one.ranks) for one in found.findings), set()]
    sets = [{int(rank) for rank in re.findall(r"\d+", one)} for one in kind.split("|")]
    assert first in sets, said
    assert {rank for one in found.findings for rank in one.ranks} <= set().union(
        *sets
    ), said
    assert re.search(patterns.get("says", ""), said), said
    assert not re.search(patterns.get("not", "(?!)"), said), said
    if kind == "harmless":
        assert {one.id for one in found.findings} <= {NOT_ENOUGH}, said
