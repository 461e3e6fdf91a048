"""Logs in words that no table has: general rows, labels that are learned, and what is told beside a
verdict. Harmless ones are among them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diagnosing import report_of

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
