"""Exceptions by type and innermost frames: whose own they are, who only waited, and who waited for
the start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import report_of

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.rank_end import Error, error_of, frames_in
from nemo_patches.tracing import records
from nemo_patches.tracing.records import LONGEST_MESSAGE, Raised, raised_by

pytestmark = [pytest.mark.wheel, pytest.mark.one_nemo]


def traceback(*files: str) -> str:
    """Innermost last."""
    frames = (
        f'  File "{file}", line 7, in {name}\n    call()\n'
        for file, _, name in (f.partition(":") for f in files)
    )
    return "Traceback (most recent call last):\n" + "".join(frames)


SITE = "/env/lib/python3.11/site-packages"
USER = "/job/train.py:main"
S3 = traceback(
    USER,
    f"{SITE}/botocore/httpsession.py:send",
    f"{SITE}/urllib3/response.py:read",
    "/usr/lib/ssl.py:read",
)
ALL_REDUCE = traceback(
    USER,
    f"{SITE}/torch/distributed/c10d_logger.py:wrapper",
    f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce",
)
BACKWARD = traceback(
    USER,
    f"{SITE}/torch/_tensor.py:backward",
    f"{SITE}/torch/autograd/graph.py:_engine_run_backward",
)
BROADCAST = traceback(USER, f"{SITE}/torch/nn/parallel/distributed.py:_sync_buffers")
CHECKPOINT = traceback(
    USER, f"{SITE}/torch/distributed/checkpoint/filesystem.py:read_data"
)
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by"
    " peer [127.0.0.1]:37163"
)
RESET = "Connection reset by peer"
WAITED = [
    (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:2356, unhandled system error",
        "",
    ),
    (
        "torch.distributed.DistBackendError",
        "[3] is setting up NCCL communicator, but could not get it",
        "",
    ),
    (
        "DistNetworkError",
        "Connection was likely closed. Did the remote server shutdown or crash?",
        "",
    ),
    ("LengthSyncTimeout", "rank 3 did not come within 10 s", ""),
    ("StopTogetherError", "the ranks are out of step", ""),
    ("RuntimeError", GLOO, ALL_REDUCE),
    ("RuntimeError", GLOO, traceback(USER)),  # work.wait() of the user's own
    ("RuntimeError", GLOO, ""),
    ("RuntimeError", RESET, ALL_REDUCE),
    ("RuntimeError", RESET, BACKWARD),
    ("RuntimeError", RESET, BROADCAST),
    ("RuntimeError", RESET, ""),  # whose it is nothing tells, so nobody is accused
    ("RuntimeError", "NCCL communicator was aborted on rank 2.", ""),
    ("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 1000 ms", ""),
]
OWN = [
    ("ConnectionResetError", f"[Errno 104] {RESET}", S3),
    ("ConnectionResetError", f"[Errno 104] {RESET}", ""),
    (
        "urllib3.exceptions.ProtocolError",
        f"('Connection broken', ConnectionResetError(104, '{RESET}'))",
        S3,
    ),
    (
        "botocore.exceptions.ConnectionClosedError",
        "Connection closed by the endpoint before a response",
        "",
    ),
    ("RuntimeError", f"s3://bucket/shard-17.tar: {RESET}", S3),
    ("RuntimeError", f"s3://bucket/step-100: {RESET}", CHECKPOINT),
    ("BrokenPipeError", "[Errno 32] Broken pipe", traceback(USER)),
    ("ValueError", "gloo/transport is no manifest", ""),
    ("OSError", "Timed out waiting 1000 ms for the file server", ""),
    (
        "RuntimeError",
        "stack expects each tensor to be equal size, but got [16, 64] at entry 0",
        "",
    ),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", BACKWARD),
    (
        "DistBackendError",
        "NCCL error: ncclInvalidUsage. Duplicate GPU detected : rank 0 and rank 1",
        "",
    ),
    (
        "DistNetworkError",
        (
            "The server socket has failed to bind to [::]:29500 (errno: 98 - Address"
            " already in use)"
        ),
        "",
    ),
    ("RuntimeError", "Distributed package doesn't have NCCL built in", ALL_REDUCE),
]


@pytest.mark.parametrize(("kind", "message", "raised"), WAITED)
def test_a_rank_that_waited(kind: str, message: str, raised: str) -> None:
    assert Error(kind, message, frames_in(raised)).is_of_a_collective
    assert not Error(kind, message, frames_in(raised)).is_of_the_start


@pytest.mark.parametrize(("kind", "message", "raised"), OWN)
def test_an_exception_of_its_own(kind: str, message: str, raised: str) -> None:
    assert not Error(kind, message, frames_in(raised)).is_of_a_collective


@pytest.mark.parametrize(
    ("kind", "message", "raised"),
    [
        (
            "DistStoreError",
            "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            "",
        ),
        (
            "RuntimeError",
            (
                "Timed out initializing process group in store based barrier on rank:"
                " 0, for key: k"
            ),
            "",
        ),
        (
            "DistNetworkError",
            (
                "The client socket has timed out after 600000ms while trying to connect"
                " to (n1, 1)"
            ),
            "",
        ),
        ("RendezvousTimeoutError", "", ""),
        (
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError",
            "The connection has failed.",
            "",
        ),
        (
            "DistNetworkError",
            "Connection was likely closed.",
            traceback(
                USER, f"{SITE}/torch/distributed/distributed_c10d.py:init_process_group"
            ),
        ),
    ],
)
def test_the_start_up(kind: str, message: str, raised: str) -> None:
    assert Error(kind, message, frames_in(raised)).is_of_a_collective
    assert Error(kind, message, frames_in(raised)).is_of_the_start


WORKER = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most"
    ' recent call last):\n  File "/env/torch/utils/data/_utils/worker.py", line 358, in'
    " _worker_loop\n    data = fetcher.fetch(index)\n           ^^^^^^^^^^^^^^^^^^^^\n "
    ' File "/job/data.py", line 41, in read\n    raise OSError(5, name)\n{end}'
)


def test_of_a_data_loaders_worker_the_workers_own_exception() -> None:
    record = Raised(
        1.0,
        "",
        0,
        "RuntimeError",
        WORKER.format(end="requests.exceptions.HTTPError: 503\nUnavailable\n"),
        "",
    )
    error = error_of(record)
    assert (error.type, error.message) == ("HTTPError", "503\nUnavailable")
    assert error.line == "HTTPError: 503"
    assert error.frames[0] == ("/job/data.py", "41", "read")
    plain = Raised(1.0, "", 0, "RuntimeError", "Caught in the act", "")
    assert error_of(plain)[:2] == ("RuntimeError", "Caught in the act")


def test_of_a_message_that_is_cut_its_traceback_tells() -> None:
    whole = WORKER.format(end="OSError: [Errno 5] a_17.wav\n")
    record = Raised(
        1.0,
        "",
        0,
        "RuntimeError",
        whole[:-60],
        f"Traceback (most recent call last):\nRuntimeError: {whole}",
    )
    assert error_of(record).line == "OSError: [Errno 5] a_17.wav"
    nothing_more = Raised(1.0, "", 0, "RuntimeError", whole[:-60], "")
    assert (
        error_of(nothing_more).line
        == "RuntimeError: Caught RuntimeError in DataLoader worker process 0."
    )


def test_of_a_long_message_both_ends_are_recorded() -> None:
    deep = '  File "/job/deep.py", line 1, in recurse\n    recurse()\n' * 200
    record = raised_by(
        1.0, "", 0, RuntimeError(WORKER.format(end=deep + "KeyError: 'transcript'\n"))
    )
    assert len(record.message) <= LONGEST_MESSAGE
    assert error_of(record)[:2] == ("KeyError", "'transcript'")


def job(
    folder: Path, failed: dict[int, tuple[float, float, str, str]], host: str = "node"
) -> Diagnosis:
    """Four ranks after one call. failed: by rank when its trace began; of its exception: seconds
    later, type, file.
    """
    for rank in range(4):
        started, t, kind, file = failed.get(rank, (1000.0, 5.0, "", ""))
        versions, where = {"python": "3"}, host.format(rank=rank)
        told: list[records.Record] = [
            records.Header(
                records.FORMAT,
                rank,
                4,
                where,
                4711 + rank,
                started,
                0,
                versions,
                {},
                [],
            ),
            records.Enter(
                0.2, "ConformerEncoder", 1, True, [2, 80, 700], "float32", "cpu"
            ),
            records.Leave(0.3, "ConformerEncoder", 1, [2, 16, 88]),
        ]
        error = f"{kind}: no such audio" if kind else "RuntimeError: " + GLOO
        if kind:
            told.append(
                Raised(t, "", 0, kind, "no such audio", traceback(USER, f"{file}:read"))
            )
        told.append(records.End(t + 1, error=error))
        (folder / f"rank-{rank:05}.20261124T000000.{4711 + rank}.jsonl").write_bytes(
            b"".join(map(records.encode, told))
        )
    return report_of(folder)


def test_the_first_by_the_hosts_clock_and_all_that_raised_the_same_at_one_place(
    tmp_path: Path,
) -> None:
    first, alike, elsewhere = (
        (1000.0, 2.0, "OSError", "/job/data.py"),
        (1001.5, 1.5, "OSError", "/job/data.py"),
        "/job/x.py",
    )
    (one_host := tmp_path / "one host").mkdir()
    report = job(one_host, {3: first, 1: alike, 0: (1002.5, 1.0, "OSError", elsewhere)})
    assert (report.findings[0].id, report.findings[0].ranks) == (
        ids.EXCEPTION,
        (1, 3),
    ), report.verdict
    assert report.findings[0].text.startswith("Ranks 1, 3 raised OSError")
    (hosts := tmp_path / "hosts").mkdir()
    report = job(
        hosts, {3: first, 0: (999.0, 9.0, "ValueError", elsewhere)}, host="node{rank}"
    )
    # Their clocks cannot be compared: both are told.
    assert {one.ranks for one in report.findings[:2]} == {(0,), (3,)}, report.verdict
