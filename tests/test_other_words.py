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
    "ras two behind",
    "#0-0 (fa93daea854b060b) MISMATCH\n  Communicator ranks have different AllGather operation counts\n  62 ranks have launched up to operation 88\n  2 ranks have launched up to operation 87\n  Rank 3 -- GPU 3 managed by process 35 on node 10.0.0.24\n  Rank 9 -- GPU 1 managed by process 36 on node 10.0.0.25\n",
    ["[Rr]anks 3, 9"],
    file="ras.txt",
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
    "harmless gpu idle",
    "\n".join(f"[GPU {g}] util 99% mem 70%" for g in (1, 0, 2, 3) * 4),
    [],
    ["missing-rank", r"[Rr]ank \d"],
)
case(
    "k8s labels with clean",
    "\n".join(f"worker-{i} epoch {e} done" for e in range(3) for i in (1, 0)),
    [],
    ["missing-rank", "is not there"],
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
case("pdsh", "node3: worker 9 killed (signal 9)\n", ["[Rr]ank 9"])


case(
    "torchx replica",
    "\n".join(f"trainer/{i} step {s}" for s in range(4) for i in (2, 1, 0))
    + '\ntrainer/1 Traceback (most recent call last):\ntrainer/1   File "/a/t.py", line 3, in f\ntrainer/1 ValueError: nan loss',
    ["ValueError: nan loss"],
    ["rank 0 raised"],
)
case("exit -11", "pool: process 1 exit code: -11\n", ["[Rr]ank 1"])
case(
    "unpaired",
    "rank 1 crashed\n[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/a/t.py\", line 3, in f\n[rank1]: KeyError: 'z'",
    ["[Rr]ank 1 raised KeyError"],
)


ENCODER = "".join(
    f"[rank{rank}] step 41: About to call encoder\n[rank{rank}] step 41: encoder completed\n"
    for rank in (0, 2, 1)
)
case("prints: all came out", ENCODER, ["Nothing is recognised"], ["guess"])
case(
    "prints: training has ended",
    ENCODER + "[rank0] About to call encoder\nTraining finished\n",
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


def examples() -> dict[str, tuple[str, list[tuple[str, str]], str]]:
    """By name: whom it accuses, or that it is harmless; what is said, and what not; the log."""
    found = {}
    for one in EXAMPLES.read_text().split("\n=== [")[1:]:
        head, _, log = one.partition("\n")
        kind, _, name = head.partition("] ")
        patterns = []
        while log.startswith(("says: ", "not: ")):
            line, _, log = log.partition("\n")
            key, _, pattern = line.partition(": ")
            patterns.append((key, pattern))
        found[name] = kind, patterns, log + "\n"
    return found


@pytest.mark.parametrize("name", examples())
def test_examples(name: str, tmp_path: Path) -> None:
    kind, patterns, log = examples()[name]
    (tmp_path / "train.log").write_text(log)
    found = report_of(tmp_path / "train.log")
    told = [f"{one.id}: {one.text}" for one in found.findings]
    said = "\n".join([found.verdict, *told])
    first, *_ = [*(set(one.ranks) for one in found.findings), set()]
    sets = [{int(rank) for rank in re.findall(r"\d+", one)} for one in kind.split("|")]
    assert first in sets, said
    accused = {rank for one in found.findings for rank in one.ranks}
    assert accused <= set().union(*sets), said
    for key, pattern in patterns:
        assert bool(re.search(pattern, said)) == (key == "says"), (pattern, said)
    if kind == "harmless":
        assert {one.id for one in found.findings} <= {NOT_ENOUGH}, said
