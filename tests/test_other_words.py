"""Logs in words that no table has: general rows, labels that are learned, and what is told beside a
verdict. Harmless ones are among them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diagnosing import report_of

from nemo_patches.tools.diagnose.findings import MISSING_RANK, NOT_ENOUGH

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
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
    guesses = [one for one in found.findings if "guess" in one.text.lower()]
    assert not any(one.ranks for one in guesses), said
    if kind == "harmless":
        assert {one.id for one in found.findings} <= {NOT_ENOUGH}, said


def test_numbers_that_are_none_or_too_long_end_no_reader(tmp_path: Path) -> None:
    long = "9" * 5000
    (tmp_path / "train.log").write_text(
        '{"device_id": "2.1", "rank_id": "1.2"}\n'
        '{"device_id": "2", "device_ip": "...", "rank_id": "10"}\n'
        f"PID STAT COMMAND\n{long} Sl python train.py --rank 1\n{long}1 T python --rank 2\n"
        f"rank  age_s\n0     1.2.3\n1     {long}\n2     4\n"
    )
    assert {one.id for one in report_of(tmp_path / "train.log").findings} <= {
        NOT_ENOUGH,
        MISSING_RANK,
    }


WAITED_FOR_0 = (
    "[rank{0}]: torch.distributed.DistBackendError: [{0}] is setting up NCCL communicator and"
    " retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0')"
    " got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0\n"
)
LOGIN = "wait (threading.py:331)\n    login (tracker/run.py:41)"
STACK_OF_0 = """\
# py-spy dump --pid 601   (RANK=0)
Process 601: python3 -u train.py
Python v3.11.9 (/usr/bin/python3.11)

Thread 601 (idle): "MainThread"
    {}
    main (train.py:176)
    <module> (train.py:388)
"""


def test_whom_others_waited_for_is_where_its_own_stack_shows_it(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(WAITED_FOR_0.format(1) + WAITED_FOR_0.format(2))
    (tmp_path / "stack.txt").write_text(STACK_OF_0.format(LOGIN))
    found = report_of(tmp_path)
    assert found.verdict.startswith("Rank 0: it waits for a lock"), found.verdict
    assert "Ranks 1-2 waited until a time limit." in found.verdict
    first = found.findings[0]
    assert first.ranks == (0,)
    evidence = "\n".join(first.evidence)
    assert "it had not come to the set-up of the first NCCL communicator" in evidence
    assert "main (train.py:176) > login (run.py:41) > wait" in evidence


def test_whom_others_waited_for_may_wait_itself(tmp_path: Path) -> None:
    """In another collective by its own stack: nobody is accused by the others' words."""
    (tmp_path / "job.log").write_text(WAITED_FOR_0.format(1) + WAITED_FOR_0.format(2))
    barrier = "barrier (torch/distributed/distributed_c10d.py:4159)"
    (tmp_path / "stack.txt").write_text(STACK_OF_0.format(barrier))
    assert not [one.ranks for one in report_of(tmp_path).findings if one.ranks]


def test_the_host_of_a_kernels_log_is_in_its_files_name(tmp_path: Path) -> None:
    gpu = "NCCL INFO comm 0x7a rank {} nranks 4 cudaDev 1 nvmlDev 1 busId c1000 commId 0x7\n"
    (tmp_path / "job.log").write_text(
        f"n1:1:1 [0] {gpu.format(1)}n12:1:1 [0] {gpu.format(3)}"
        "[rank3]:[E609 03:13:01.2 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 3]"
        " Process group watchdog thread terminated with exception: CUDA error: unknown error\n"
    )
    xid = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n"
    (tmp_path / "dmesg_n12.txt").write_text(xid)
    assert "by the kernel: Xid" in report_of(tmp_path).verdict
    (tmp_path / "dmesg_n12.txt").rename(tmp_path / "dmesg.txt")  # of which, is not told
    assert "its GPU's error" not in report_of(tmp_path).verdict


def test_a_gpu_that_fails_is_no_fault_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "[rank3]:[E1003 04:10:00.1 ProcessGroupNCCL.cpp:1] [Rank 3] Process group watchdog"
        " thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
    )
    found = report_of(tmp_path / "train.log")
    assert found.findings[0].ranks == (3,)
    assert "Look at that GPU" in found.next_step


INIT = (
    "n{0}:{1}:{1} [0] NCCL INFO ncclCommInitRank comm 0xb8 rank {0} nranks {2} cudaDev 0 nvmlDev 0"
    " busId f01000 commId 0x71 - Init COMPLETE\n"
)
AT = (
    "Process {}: python -u train.py\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
    'Thread {} (active): "MainThread"\n    {}\n    <module> (train.py:398)\n\n'
)
READS = "read (torch/storage.py:12)\n    load (data.py:7)"
WAITS = "all_reduce (torch/distributed/distributed_c10d.py:2501)"


def test_nccls_line_tells_the_rank_of_a_process_also_for_stacks_in_notes(
    tmp_path: Path,
) -> None:
    log, notes = tmp_path / "job.log", tmp_path / "notes.md"
    log.write_text(INIT.format(0, 881, 2) + INIT.format(1, 512, 2))
    example = AT.format(77, 77, READS)
    notes.write_text(AT.format(512, 512, READS) + AT.format(881, 881, WAITS) + example)
    assert report_of(tmp_path).findings[0].ranks == (1,)
    notes.write_text(example)
    assert not [one for one in report_of(tmp_path).findings if one.ranks]
    # Groups of two, of a larger job
    others = INIT.format(0, 71, 2) + INIT.format(1, 72, 2)
    log.write_text(log.read_text() + others)
    notes.write_text(AT.format(512, 512, READS) + AT.format(881, 881, WAITS))
    assert not [one for one in report_of(tmp_path).findings if one.ranks]
