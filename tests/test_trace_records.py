"""The trace's writer and recorder without NeMo: parts, kills, full disks, forks, exits; training never notices."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.utils.checkpoint
import traces
from ranks import wait_until

from nemo_patches.sync.events import Grown, bus
from nemo_patches.sync.settings import SettingsError
from nemo_patches.tools.diagnose.decoder import decode
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import CRITICAL
from nemo_patches.tools.diagnose.folder import Folder
from nemo_patches.tools.diagnose.rank_trace import RankTrace
from nemo_patches.tracing import recorded_forward
from nemo_patches.tracing import writer as writer_module
from nemo_patches.tracing.lengths_copy import LengthsCopies
from nemo_patches.tracing.recorder import tracing
from nemo_patches.tracing.records import (
    FORMAT,
    CheckFinding,
    Encoder,
    Enter,
    Failed,
    Header,
    Lengths,
    Memory,
    PreEncoded,
    Raised,
    encode,
)
from nemo_patches.tracing.settings import TraceSettings
from nemo_patches.tracing.writer import TraceWriter

pytestmark = pytest.mark.one_nemo

LIMIT = timedelta(seconds=20)


def header(bound: int = 1 << 20) -> Header:
    versions, settings = {"python": "3"}, {"sync": "bounded"}
    return Header(FORMAT, 3, 8, "node", 4711, 1.5e9, 0, 0, bound, versions, settings, [])


def encoder(e: int = 1, **changes: Any) -> Encoder:
    known: dict[str, Any] = {"flag": True, "configured": "?", "pos_emb_max_len": 60, "normalisation": "batch_norm"}
    return Encoder(t=0.0, e=e, name="ConformerEncoder", ddp=True, registered={}, grown={}, **{**known, **changes})


@pytest.fixture
def said() -> Iterator[list[str]]:
    """nemo_patches' own lines."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("nemo_patches")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_settings_come_from_a_keyword_else_a_variable_else_the_default(tmp_path: Path) -> None:
    assert TraceSettings.resolve(environment={}) == TraceSettings(None, 256.0, (), "continue")
    environment = {
        "NEMO_PATCHES_TRACE": str(tmp_path),
        "NEMO_PATCHES_TRACE_SIZE": "8",
        "NEMO_PATCHES_TRACE_CHECKS": "barrier, inputs",
        "NEMO_PATCHES_ON_FINDING": "raise",
    }
    assert TraceSettings.resolve(environment=environment) == TraceSettings(
        tmp_path, 8.0, ("inputs", "barrier"), "raise"
    )
    keywords = {"trace": tmp_path / "there", "trace_size": 1, "trace_checks": ["cuda"], "on_finding": "continue"}
    there = TraceSettings.resolve(keywords, environment)
    assert there == TraceSettings(tmp_path / "there", 1.0, ("cuda",), "continue")
    off = TraceSettings.resolve({"trace": ""}, environment)  # whatever the variables say
    assert (off.folder, off.checks) == (None, ())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"trace": 5}, "trace=5 is not allowed; allowed: a folder"),
        ({"trace_size": 0}, "trace_size=0 is not allowed; allowed: a number of MiB, 0.1 to 1000000"),
        ({"trace_size": "much"}, "trace_size='much' is not allowed"),
        ({"trace_checks": "input"}, "trace_checks='input' is not allowed; allowed.*'inputs', 'cuda', 'barrier'"),
        ({"on_finding": "stop"}, "on_finding='stop' is not allowed; allowed: 'continue', 'raise'"),
        (
            {"trace": "", "trace_checks": "inputs"},
            "trace_checks='inputs' is not allowed without a trace: set trace=DIR",
        ),
        ({"environment": {"NEMO_PATCHES_TRACE_SIZE": "-1"}}, "NEMO_PATCHES_TRACE_SIZE='-1' is not allowed"),
        (
            {"trace": None, "environment": {"NEMO_PATCHES_TRACE_CHECKS": "cuda"}},
            "NEMO_PATCHES_TRACE_CHECKS='cuda'.*without a trace",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        TraceSettings.resolve({"trace": "here", **given}, given.get("environment", {}))


def test_a_file_begins_with_its_header_and_ends_with_its_end(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "new" / "folder", header())
    writer.put(encoder())
    writer.put(Enter(writer.now(), 1, 1, True, True, [2, 80, 700], "float32", "cpu"))
    t = writer.now()
    writer.put_later(lambda: Memory(t, 5, None, None))
    writer.close(LIMIT)
    (file,) = traces.files(tmp_path / "new" / "folder")
    assert file.name == "rank-00003.20170714T024000.4711.0.jsonl"
    found = traces.records(file)
    assert traces.kinds(found) == ["header", "encoder", "enter", "memory", "end"]
    assert found[0]["format"] == FORMAT
    assert found[2]["shape"] == [2, 80, 700]
    assert [one["t"] for one in found[2:]] == sorted(one["t"] for one in found[2:])


def test_a_file_that_is_there_is_never_written_into(tmp_path: Path) -> None:
    """The same process may begin a second trace within a second."""
    for _ in range(2):
        TraceWriter(tmp_path, header()).close(LIMIT)
    for file in traces.files(tmp_path):
        assert traces.kinds(traces.records(file)) == ["header", "end"]
    assert len(traces.files(tmp_path)) == 2


def test_parts_stay_within_the_bound_and_each_can_be_read_alone(tmp_path: Path) -> None:
    bound = 40_000
    writer = TraceWriter(tmp_path, header(bound))
    writer.put(encoder(1))
    writer.put(encoder(2, flag=None))
    for number in range(3000):
        writer.put(PreEncoded(writer.now(), 1, number))
        if number == 1000:
            writer.put(encoder(1, pos_emb_max_len=61))
        if number % 500 == 0:
            wait_until(lambda: writer._queue.qsize() == 0)
            assert traces.size_bytes(tmp_path) <= bound
    writer.close(LIMIT)
    parts = [traces.records(file) for file in sorted(tmp_path.iterdir(), key=lambda file: int(file.name.split(".")[3]))]
    assert len(parts) == 2
    first, last = parts
    assert first[0]["part"] + 1 == last[0]["part"] >= 3
    for part in parts:
        assert traces.kinds(part)[:4] == ["header", "encoder", "encoder", "pre"]
        assert [one["pos_emb_max_len"] for one in part[1:3]] == [61, 60]  # as last described
    numbers = [one["n"] for part in parts for one in part if one["k"] == "pre"]
    assert numbers == list(range(numbers[0], 3000))
    assert last[-1]["k"] == "end"


def test_a_ring_that_has_lost_its_beginning_says_so_and_keeps_exceptions_and_findings(
    tmp_path: Path, said: list[str]
) -> None:
    bound = 100_000
    writer = TraceWriter(tmp_path, header(bound))
    writer.put(encoder(1))
    kept = [
        Raised(writer.now(), 1, 1, "ValueError", "no such audio", "Traceback \u00e9"),
        CheckFinding(writer.now(), 1, 2, "inputs", "2 NaN"),
        Failed(writer.now(), "prefetch", "OSError", "no such file", "Traceback"),
    ]
    for record in kept:
        writer.put(record)
    written = 4
    for number in range(3, 9000):
        findings = number % 10 == 0  # more than there is room for
        writer.put(
            CheckFinding(writer.now(), 1, number, "inputs", "N" * 200) if findings else PreEncoded(0.0, 1, number)
        )
        written += 1
    writer.close(LIMIT)
    (line,) = said
    assert "the trace has reached trace_size=0.0953674 MiB: its oldest records go" in line
    parts = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    first, last = map(traces.records, parts)
    assert traces.size_bytes(tmp_path) <= bound
    for part in (first, last):
        again = [json.loads(one["record"]) for one in traces.of_kind(part, "kept")]
        assert again[:3] == [json.loads(encode(record)) for record in kept]
        assert again[-1]["n"] > 1000 and 20 < len(again) <= 64
    there = [one for part in (first, last) for one in part if one["k"] not in ("header", "encoder", "kept", "end")]
    assert last[0]["gone"] + len(there) == written
    trace = RankTrace(Header(**{name: value for name, value in first[0].items() if name != "k"}))
    for file in parts:
        trace.take(decode(file.read_bytes()))
    assert [(one.type, one.n) for one in trace.raised] == [("ValueError", 1)]  # once, though both parts have it
    assert len(trace.failed) == 1 and {2, 10, 20} < {one.n for one in trace.findings}
    assert len({one.n for one in trace.findings}) == len(trace.findings) and not trace.bad_lines


def test_what_the_disk_cannot_take_is_lost_and_counted_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_WAITING", 100)
    writer = TraceWriter(tmp_path, header())
    goes_on, stands = threading.Event(), threading.Event()

    def slow() -> Memory:
        stands.set()
        assert goes_on.wait(20)
        return Memory(writer.now(), 1, None, None)

    writer.put_later(slow)
    assert stands.wait(20)
    for number in range(107):
        writer.put(PreEncoded(writer.now(), 1, number))
    goes_on.set()
    wait_until(lambda: writer._queue.qsize() == 0)
    writer.put(PreEncoded(writer.now(), 1, 200))
    writer.close(LIMIT)
    found = traces.records(*traces.files(tmp_path))
    assert traces.kinds(found) == ["header", "memory", *["pre"] * 100, "lost", "pre", "end"]
    assert traces.of_kind(found, "lost")[0]["count"] == 7


def test_a_disk_that_does_not_answer_holds_up_the_exit_no_longer_than_the_limit(
    tmp_path: Path, said: list[str]
) -> None:
    writer = TraceWriter(tmp_path, header())
    goes_on = threading.Event()

    def stuck() -> Memory:
        goes_on.wait(20)
        return Memory(0.0, 1, None, None)

    writer.put_later(stuck)
    start = time.monotonic()
    writer.close(timedelta(seconds=0.2))
    assert time.monotonic() - start < 5
    (line,) = said
    assert "the trace has no end" in line and str(tmp_path) in line
    goes_on.set()


def test_a_folder_that_cannot_be_written_is_said_once_and_nothing_is_raised(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").touch()
    writer = TraceWriter(tmp_path / "file" / "folder", header())
    wait_until(lambda: writer.ended)
    for number in range(3):
        writer.put(PreEncoded(writer.now(), 1, number))
    writer.close(LIMIT)
    (line,) = said
    assert "tracing has ended, training goes on" in line and str(tmp_path / "file") in line
    assert "[rank " in line


def test_a_file_that_somebody_removes_ends_the_trace_and_that_is_said(tmp_path: Path, said: list[str]) -> None:
    writer = TraceWriter(tmp_path / "folder", header())
    wait_until(lambda: traces.files(tmp_path / "folder"))
    shutil.rmtree(tmp_path / "folder")
    for number in range(3):
        writer.put(PreEncoded(writer.now(), 1, number))
    wait_until(lambda: writer.ended)
    (line,) = said
    assert "tracing has ended, training goes on" in line and "jsonl: it was removed" in line


def test_a_subscribers_error_is_said_once_and_it_gets_no_more(said: list[str]) -> None:
    class Broken:
        calls = 0

        def handle(self, event: object) -> None:
            self.calls += 1
            raise KeyError("a bug")

    broken = Broken()
    bus.subscribe("tracing", {Grown: broken.handle})
    for _ in range(3):
        bus.publish(Grown(torch.nn.Identity(), 1, 2))
    assert broken.calls == 1
    (line,) = said
    assert "tracing has ended by an error of its own" in line and "a bug" in line


def recorded_class(forward: Any) -> Any:
    name, replacement = recorded_forward.recorded(forward)
    return type("Encoder", (torch.nn.Module,), {name: forward, "forward": replacement, "max_audio_length": 5})


def test_growth_in_a_class_without_layers_and_without_a_process_group(tmp_path: Path) -> None:
    def forward(self: Any, features: torch.Tensor, features_length: torch.Tensor) -> torch.Tensor:
        self.max_audio_length = features.shape[-1]
        return features

    encoder = recorded_class(forward)()
    tracing.start(TraceSettings(tmp_path))
    encoder(torch.ones(2, 9), torch.tensor([9, 3]))  # by position
    tracing.stop()
    found = traces.records(*traces.files(tmp_path))
    assert traces.kinds(found)[2:] == ["enter", "lengths", "memory", "grow", "encoder", "leave", "stopped"]
    assert (found[2]["shape"], found[2]["lengths_shape"], found[2]["path"]) == ([2, 9], [2], "")
    assert found[2]["group"] is False
    assert (found[3]["shortest"], found[3]["longest"], found[3]["t"]) == (3, 9, found[2]["t"])
    assert (found[5]["old"], found[5]["new"]) == (5, 9)


def test_an_error_of_the_recorders_is_said_once_and_does_not_reach_the_call(tmp_path: Path, said: list[str]) -> None:
    def forward(self: Any, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return audio_signal + length

    encoder = recorded_class(forward)()
    encoder.max_audio_length = "long"
    tracing.start(TraceSettings(tmp_path))
    try:
        for _ in range(3):
            assert encoder(torch.ones(2), length=torch.ones(2)).tolist() == [2, 2]
        assert "an error of its own" in tracing.where()
    finally:
        tracing.stop()
    (line,) = said
    assert "tracing has ended: an error of its own, please report it: ValueError" in line
    assert traces.kinds(traces.records(*traces.files(tmp_path))) == ["header", "stopped"]


class Raises(torch.autograd.Function):
    """As an out-of-memory error in the backward."""

    @staticmethod
    def forward(context: Any, signal: torch.Tensor) -> torch.Tensor:
        return signal.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("swallowed")


def test_a_backward_is_recorded_where_there_is_one_and_keeps_nothing_alive(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def forward(self: Any, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (audio_signal * weight).exp()

    encoder, signal = recorded_class(forward)(), torch.ones(2, 3)

    def call(audio_signal: torch.Tensor = signal) -> torch.Tensor:
        return encoder(audio_signal, torch.tensor([3, 3]))  # type: ignore[no-any-return]

    def checkpointed(reentrant: bool) -> None:
        torch.utils.checkpoint.checkpoint(
            call, signal.clone().requires_grad_(), use_reentrant=reentrant
        ).sum().backward()

    tracing.start(TraceSettings(tmp_path))
    call().sum().backward()  # call 1
    gradient, weight.grad = weight.grad, None
    with torch.no_grad():
        call()  # call 2
    weakref_to_output = weakref.ref(call())  # call 3: left out
    assert weakref_to_output() is None
    total = call().sum() + call().sum()  # calls 4 and 5 have one backward
    total.backward(retain_graph=True)
    total.backward()
    output = call(Raises.apply(signal.clone().requires_grad_()))  # call 6
    with pytest.raises(torch.OutOfMemoryError):
        output.sum().backward()
    weight.requires_grad_(False)
    call()  # call 7
    weight.requires_grad_(True)
    checkpointed(False)  # call 8, of which call 9 is recomputed
    checkpointed(True)  # call 10 without a graph, recomputed as call 11
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        weight.grad = None
        call().sum().backward()  # call 12
    tracing.stop()
    assert gradient is not None and weight.grad is not None and torch.equal(gradient, weight.grad)
    found = traces.records(*traces.files(tmp_path))
    graphs = {one["n"] for one in traces.of_kind(found, "leave", graph=True)}
    assert graphs == {1, 3, 4, 5, 6, 8, 12}
    assert sorted(one["n"] for one in traces.of_kind(found, "backward")) == [1, 4, 4, 5, 5, 6, 8]
    assert sorted(one["n"] for one in traces.of_kind(found, "backward_ended")) == [1, 4, 4, 5, 5, 8]
    assert {one["n"] for one in traces.of_kind(found, "leave")} == set(range(1, 13))
    assert traces.of_kind(found, "raised") == []


def test_a_trace_for_a_person_is_a_line_before_and_a_line_after_each_call(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if len(length) > 2:
            raise ValueError("too many")
        return audio_signal * 2

    monkeypatch.chdir(tmp_path)
    encoder = recorded_class(forward)()
    tracing.start(TraceSettings.resolve(environment={"NEMO_PATCHES_TRACE": "-"}))
    assert str(tracing.recorder.settings).startswith("trace=-, ") and tracing.where().startswith("not begun")
    encoder(torch.ones(2, 3, 4), torch.tensor([4, 3]))
    with pytest.raises(ValueError, match="too many"):
        encoder.eval()(torch.ones(1, 3, 4), torch.tensor([4, 3, 2]))
    assert tracing.where() == "-"
    tracing.stop()
    begins, done, second, raised = capsys.readouterr().err.splitlines()
    who = rf"\d\d:\d\d:\d\d nemo_patches \[rank 0/1 {re.escape(socket.gethostname())}\] Encoder: call"
    assert re.fullmatch(rf"{who} 1 begins: training, signal \[2, 3, 4\] float32 on cpu, lengths' shape \[2\]", begins)
    assert re.fullmatch(rf"{who} 1 is done: output \[2, 3, 4\], lengths 3 to 4, \d\.\d+ s", done)
    assert re.match(rf"{who} 2 begins: evaluation, ", second)
    assert re.fullmatch(rf"{who} 2 has raised ValueError: too many", raised)
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_copied_without_a_wait_and_read_once_they_are_there() -> None:
    copies, lengths = LengthsCopies(), torch.tensor([7, 5, 9], dtype=torch.int32)
    read = copies.begin(lengths)
    assert read is not None
    lengths.fill_(1)  # by the training loop, later
    assert read() == (5, 9)
    with torch.inference_mode():  # in the same buffer
        read = copies.begin(torch.tensor([[2.0, 8.0]]))
    assert read is not None and read() == (2, 8)
    assert copies.begin(None) is copies.begin(torch.ones(0)) is copies.begin(torch.ones(2, device="meta")) is None
    (buffer,) = copies._free[False]
    read = copies.begin(torch.ones(300))
    assert read is not None and read() == (1, 1)
    # A stand-in for a GPU that has not got to it: what it would write is not there.
    read = copies.begin(torch.ones(2))
    buffer[1] = torch.iinfo(torch.int64).min
    assert read is not None and read() is None
    buffer[1] = 3
    assert read() == (1, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lengths_on_a_gpu_come_when_it_has_got_to_them_and_nothing_waits(tmp_path: Path) -> None:
    def forward(self: Any, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return audio_signal

    encoder, signal = recorded_class(forward)(), torch.ones(2, 9, device="cuda")
    length = torch.tensor([9, 3], device="cuda")
    tracing.start(TraceSettings(tmp_path))
    encoder(signal, length)  # makes the pinned buffer
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.monotonic()
    encoder(signal, length)
    took = time.monotonic() - began
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    time.sleep(0.5)
    tracing.stop()
    found = traces.of_kind(traces.records(*traces.files(tmp_path)), "lengths")
    assert [(one["n"], one["shortest"], one["longest"]) for one in found] == [(1, 3, 9), (2, 3, 9)]
    assert took < 0.3


def test_a_record_that_is_not_there_yet_is_asked_for_again_and_holds_up_none(tmp_path: Path) -> None:
    writer, there = TraceWriter(tmp_path, header()), threading.Event()
    writer.put_later(lambda: Lengths(0.0, 1, 1, 3, 9) if there.is_set() else None)
    for number in range(3):
        writer.put(PreEncoded(writer.now(), 1, number))
    wait_until(lambda: list(tmp_path.iterdir()) and b"pre" in traces.files(tmp_path)[0].read_bytes())
    there.set()
    wait_until(lambda: b"lengths" in traces.files(tmp_path)[0].read_bytes())
    writer.put_later(lambda: None)  # never there: its GPU hangs
    writer.close(LIMIT)
    assert traces.kinds(traces.records(*traces.files(tmp_path))) == ["header", *["pre"] * 3, "lengths", "end"]


# What follows is of whole processes: an encoder of three lines, recorded as a target is.

ENCODER = """
import os, signal, sys, time
from pathlib import Path
import torch
from nemo_patches.tracing import recorded_forward
from nemo_patches.tracing.recorder import tracing
from nemo_patches.tracing.settings import TraceSettings
folder = Path(sys.argv[1])
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    def forward(self, audio_signal, length):
        return self.layers[0](audio_signal), length
original = Encoder.forward
name, Encoder.forward = recorded_forward.recorded(original)
setattr(Encoder, name, original)
encoder = Encoder()
def call():
    return encoder(audio_signal=torch.ones(2, 3, 4), length=torch.tensor([4, 3]))
tracing.start(TraceSettings(folder, size=float(os.environ.get("SIZE", "1"))))
"""


def start(program: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        [sys.executable, "-c", ENCODER + program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **variables},
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=200)
    finally:
        process.kill()


ENDINGS = {  # the program's last lines, its exit code, and what the end record says of the error and the exit code
    "sys.exit": ("sys.exit(7)", 7, ("", None)),
    "exception": ("raise KeyError('the user\\'s own')", 1, ('KeyError: "the user\'s own"', 1)),
    "caught": (  # by whoever called Lightning's trainer: training goes on
        "tracing.recorder.trainer_failed(ValueError('caught'))\ncall()",
        0,
        ("", None),
    ),
    "thread": (
        "import threading\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='prefetch'); thread.start(); thread.join()",
        0,
        ("", None),
    ),
    "hydra": (  # makes an exit of it, whose code nobody tells; somebody else may have caught it, and exit with 0
        "tracing.recorder.trainer_failed(ValueError('no such audio'))\nsys.exit(1)",
        1,
        ("ValueError: no such audio", None),
    ),
    "before any call": (
        "tracing.stop()\ntracing.start(TraceSettings(folder / 'again'))\n"
        "tracing.recorder.trainer_failed(ValueError('no such audio'))\nraise ValueError('no such audio')",
        1,
        ("ValueError: no such audio", 1),
    ),
    "multiprocessing": (  # a forked process leaves without the interpreter's exit
        "tracing.stop()\n"
        "import multiprocessing\n"
        "def rank():\n"
        "    tracing.start(TraceSettings(folder))\n"
        "    call()\n"
        "process = multiprocessing.get_context('fork').Process(target=rank)\n"
        "process.start(); process.join(30); sys.exit(process.exitcode)",
        0,
        ("", None),
    ),
    "spawn": (  # as torch.multiprocessing.spawn's processes end
        "tracing.stop()\n"
        "import multiprocessing\n"
        "def rank():\n"
        "    tracing.start(TraceSettings(folder))\n"
        "    call()\n"
        "    try:\n"
        "        raise ValueError('no such audio')\n"
        "    except ValueError:\n"
        "        sys.exit(3)\n"
        "process = multiprocessing.get_context('fork').Process(target=rank)\n"
        "process.start(); process.join(30); sys.exit(process.exitcode)",
        3,
        ("ValueError: no such audio", 3),
    ),
}


def test_every_exit_of_the_interpreter_ends_the_file_and_says_how(tmp_path: Path) -> None:
    running = {
        name: start(f"call()\n{ending}", tmp_path / name, RANK="5", WORLD_SIZE="6")
        for name, (ending, _, _) in ENDINGS.items()
    }
    for name, process in running.items():
        _, error = end(process)
        assert process.returncode == ENDINGS[name][1], error
        for file in traces.files(tmp_path / name):
            found = traces.records(file)
            call = ["encoder", "enter", "lengths", "memory", "layer", "leave"]
            stopped = name in ("multiprocessing", "spawn", "before any call") and found[0]["pid"] == process.pid
            failed = traces.of_kind(found, "failed")
            last = ["failed"] * len(failed) + ["enter", "lengths", "layer", "leave"] * (name == "caught")
            assert traces.kinds(found) == ["header", *call, *last, "stopped" if stopped else "end"]
            assert (found[0]["rank"], found[0]["world_size"]) == (5, 6)
            if not stopped:
                assert (found[-1]["error"], found[-1]["exit_code"]) == ENDINGS[name][2], name
                said = {"exception": "KeyError", "thread": "ZeroDivisionError", "sys.exit": "", "multiprocessing": ""}
                assert [one["type"] for one in failed] == ([kind] if (kind := said.get(name, "ValueError")) else [])
                assert [one["thread"] for one in failed] in ([], ["prefetch" if name == "thread" else ""])
                assert not failed or failed[0]["traceback"].startswith(("Traceback", "ValueError"))
    assert len(traces.files(tmp_path / "multiprocessing")) == 2


TERMINATED = {  # before the trace begins; after; and how the process ends
    "default": ("", "", -signal.SIGTERM),
    "user's handler": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))", "", 9),
    "handler set later": ("", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))", 9),
    "ignored": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "", 5),
    "user's faulthandler": (  # Python's own getsignal() does not tell of this
        "import faulthandler; faulthandler.register(signal.SIGTERM, file=open(folder.with_suffix('.own'), 'w'))",
        "",
        5,
    ),
    "untraced": ("", "tracing.stop()", -signal.SIGTERM),
}
TERMINATES = """
import json
from multiprocessing import Pipe
def wait_for_a_batch(ready):
    ready.send("")
    ready.poll(60)  # until the signal has come
    sys.exit(5)
tracing.stop()
children = {{}}
for name, (before, after, _) in {scenarios!r}.items():
    ours, theirs = Pipe()
    child = os.fork()
    if not child:
        folder = folder / name
        folder.mkdir()
        exec(before)
        tracing.start(TraceSettings(folder))
        call()
        while not list(folder.glob("*")) or b"leave" not in next(folder.glob("*")).read_bytes():
            time.sleep(0.01)
        exec(after)
        wait_for_a_batch(theirs)
    children[name] = child, ours
codes = {{}}
for name, (child, ready) in children.items():
    ready.recv()
    os.kill(child, signal.SIGTERM)
    ready.send("")
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


def test_sigterm_leaves_the_stack_and_goes_on_to_whom_it_went_before(tmp_path: Path) -> None:
    output, error = end(start(TERMINATES.format(scenarios=TERMINATED), tmp_path, RANK="5", WORLD_SIZE="6"))
    assert json.loads(output or "{}") == {name: code for name, (_, _, code) in TERMINATED.items()}, error
    for name in TERMINATED:
        content = traces.files(tmp_path / name)[0].read_bytes()
        noted = name in ("default", "user's handler")
        assert (b"\nStack (most recent call first):\n" in content, b"in wait_for_a_batch" in content) == (noted, noted)
    assert "wait_for_a_batch" in (tmp_path / "user's faulthandler.own").read_text()


def test_a_killed_process_leaves_whole_lines_up_to_its_last_moments(tmp_path: Path) -> None:
    endless = (
        "for number in range(10**9):\n    call()\n    time.sleep(0.003)\n"
        "    if number == 60: time.sleep(1); print('on', flush=True)\n"  # a busy machine's writer takes more than 1 ms
    )
    process = start(endless, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    end(process)
    found = traces.records(*traces.files(tmp_path), cut=True)
    assert max(one["n"] for one in traces.of_kind(found, "leave")) >= 58  # of 61: what a moment's records are
    assert len(traces.of_kind(found, "memory")) == 2
    assert not traces.of_kind(found, "end")


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for _ in range(500):
    call()
    time.sleep(0.0005)
print("trained")
print(tracing.where())
"""


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    process = start(FULL, tmp_path, SIZE="10", RANK="2", WORLD_SIZE="4")
    out, error = end(process)
    assert process.returncode == 0, error
    assert out.splitlines() == ["trained", f"ended: {tmp_path}"]
    (line,) = error.splitlines()
    assert "tracing has ended, training goes on" in line and "[rank 2/4 " in line and "too large" in line.lower()
    assert len(traces.records(*traces.files(tmp_path), cut=True)) > 50


CHILDREN = """
call()
child = os.fork()
if child == 0:
    call()
    tracing.stop()
    os._exit(0)
os.waitpid(child, 0)
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return call()[0].detach()
loader = torch.utils.data.DataLoader(Items(), num_workers=1, multiprocessing_context="fork")
assert len(list(loader)) == 2
call()
import torch.distributed as dist
for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    call()
    dist.destroy_process_group()
print(os.getpid(), child)
"""


def test_neither_forked_children_nor_loader_workers_write_into_a_ranks_file(tmp_path: Path) -> None:
    process = start(CHILDREN, tmp_path, RANK="1", WORLD_SIZE="2")
    out, error = end(process)
    assert process.returncode == 0, error
    pid, child = map(int, out.split())
    assert error.count("tracing has ended: a data loader's worker is not recorded") == 1
    found = [traces.records(file) for file in traces.files(tmp_path)]
    by_pid = {(one[0]["pid"], one[0]["rank"]): one for one in found}
    assert set(by_pid) == {(pid, 1), (child, 1), (pid, 0)}
    assert [one["n"] for one in traces.of_kind(by_pid[pid, 1], "leave")] == [1, 2]
    assert [one["n"] for one in traces.of_kind(by_pid[child, 1], "leave")] == [1]
    # Under its process group it was another rank, and its next process group changed nothing.
    assert [one["n"] for one in traces.of_kind(by_pid[pid, 0], "leave")] == [1, 2]
    assert by_pid[pid, 1][-1]["reason"] == "this process is rank 0 of 1 from now on"
    assert by_pid[pid, 0][-1]["k"] == "end"


SKIPS = """
tracing.stop()
child = os.fork()
rank = int(not child)
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(str(folder) + ".store", 2), rank=rank, world_size=2)
tracing.start(TraceSettings(folder))
parallel = torch.nn.parallel.DistributedDataParallel(encoder)
try:
    for step in range(1, 9):
        output, _ = parallel(audio_signal=torch.ones(2, 3, 4), length=torch.tensor([4, 3]))
        if rank == 0 or step != 5:  # as after an out-of-memory error that is swallowed
            output.sum().backward()
except RuntimeError:
    print("rank", rank, "waited in vain in step", step)
    os.waitpid(child, 0)
    raise
from_rank_0 = folder.glob("rank-00000.*")
while b'"backward","t"' not in next(from_rank_0).read_bytes().split(b'"leave"')[-1]:
    time.sleep(0.01)
    from_rank_0 = folder.glob("rank-00000.*")
tracing.stop()
os._exit(0)
"""


def test_a_backward_that_one_rank_leaves_out_is_found_in_the_traces_of_ddp(tmp_path: Path) -> None:
    out, error = end(start(SKIPS, tmp_path / "trace"))
    assert out.splitlines() == ["rank 0 waited in vain in step 8"], error
    first, second = map(traces.records, traces.files(tmp_path / "trace"))
    assert [one["n"] for one in traces.of_kind(first, "backward")] == list(range(1, 9))
    assert [one["n"] for one in traces.of_kind(first, "backward_ended")] == list(range(1, 8))  # with DDP's wait
    assert [one["n"] for one in traces.of_kind(second, "backward_ended")] == [1, 2, 3, 4, 6, 7, 8]
    report = diagnose(Folder(tmp_path / "trace").read())
    assert report.verdict.startswith("Rank 1 made no backward of training call 5 of Encoder"), report
    assert report.findings[0].severity == CRITICAL
    assert "in the backward, and not through it: rank 0" in report.findings[0].evidence
