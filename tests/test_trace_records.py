"""The trace's writer and recorder without NeMo: size, kills, full disks, forks, exits; training
never notices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from ranks import wait_until

from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.tracing import recorded_forward, trace_file
from nemo_patches.tracing import writer as writer_module
from nemo_patches.tracing.recorder import Recorder, tracing
from nemo_patches.tracing.records import AT_ITS_SIZE, FORMAT, Enter, Grow, Header, Timed
from nemo_patches.tracing.writer import TraceWriter
from nemo_patches.watch import log_line

pytestmark = pytest.mark.one_nemo

LIMIT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _each_line_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread logs it, which a busy machine may begin late."""
    monkeypatch.setattr(log_line, "_WRITE_LIMIT_S", LIMIT.total_seconds())


def header() -> Header:
    versions, settings = {"python": "3"}, {"sync": "bounded"}
    return Header(FORMAT, 3, 8, "node", 4711, 1.5e9, 0, versions, settings, [])


def grow(writer: TraceWriter, number: int) -> Grow:
    """Any record."""
    return Grow(writer.now(), "ConformerEncoder", number, 1, 2)


def traced(settings: Settings) -> tuple[Path | None, tuple[str, ...]]:
    return settings.trace, settings.trace_checks


def test_settings_come_from_a_keyword_else_a_variable_else_the_default(
    tmp_path: Path,
) -> None:
    assert traced(Settings.resolve(environment={})) == (None, ())
    environment = {
        "NEMO_PATCHES_TRACE": str(tmp_path),
        "NEMO_PATCHES_TRACE_CHECKS": "barrier, inputs",
    }
    assert traced(Settings.resolve(environment=environment)) == (
        tmp_path,
        ("inputs", "barrier"),
    )
    keywords = {"trace": tmp_path / "there", "trace_checks": ["cuda"]}
    there = Settings.resolve(keywords, environment)
    assert traced(there) == (tmp_path / "there", ("cuda",))
    off = Settings.resolve({"trace": ""}, environment)  # whatever the variables say
    assert traced(off) == (None, ())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"trace": 5}, "trace=5 is not allowed; allowed: a folder"),
        (
            {"trace_checks": "input"},
            "trace_checks='input' is not allowed; allowed.*'inputs', 'cuda', 'barrier'",
        ),
        (
            {"trace": "", "trace_checks": "inputs"},
            "trace_checks='inputs' is not allowed without a trace: set trace=DIR",
        ),
        (
            {"trace": None, "environment": {"NEMO_PATCHES_TRACE_CHECKS": "cuda"}},
            "NEMO_PATCHES_TRACE_CHECKS='cuda'.*without a trace",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(
    given: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        Settings.resolve({"trace": "here", **given}, given.get("environment", {}))


def test_a_file_begins_with_its_header_and_ends_with_its_end(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "new" / "folder", header())
    writer.put(
        Enter(writer.now(), "ConformerEncoder", 1, True, [2, 80, 700], "float32", "cpu")
    )
    writer.put(grow(writer, 1))
    writer.close(LIMIT)
    (file,) = traces.files(tmp_path / "new" / "folder")
    assert file.name == "rank-00003.20170714T024000.4711.jsonl"
    found = traces.records(file)
    assert traces.kinds(found) == ["header", "enter", "grow", "end"]
    assert found[0]["format"] == FORMAT
    assert found[1]["shape"] == [2, 80, 700]
    assert [one["t"] for one in found[1:]] == sorted(one["t"] for one in found[1:])


def test_a_file_that_is_there_is_never_written_into(tmp_path: Path) -> None:
    """The same process may begin a second trace within a second."""
    for _ in range(2):
        TraceWriter(tmp_path, header()).close(LIMIT)
    for file in traces.files(tmp_path):
        assert traces.kinds(traces.records(file)) == ["header", "end"]
    assert len(traces.files(tmp_path)) == 2


def test_a_file_ends_at_its_size_and_says_so_in_its_last_record_and_once_on_stderr(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trace_file, writer_module):
        monkeypatch.setattr(module, "LARGEST", 1 << 20)
    writer = TraceWriter(tmp_path, header())
    number = 0
    while not writer.ended:
        number += 1
        writer.put(grow(writer, number))
        if number % 1000 == 0:
            wait_until(lambda: writer.ended or writer._queue.qsize() == 0)
    (file,) = traces.files(tmp_path)
    wait_until(lambda: writer.output._descriptor < 0)  # type: ignore[union-attr]
    writer.put(grow(writer, 0))
    writer.close(LIMIT)
    found = traces.records(file)
    assert (1 << 20) - 2 * trace_file._FOR_THE_LAST < file.stat().st_size <= 1 << 20
    assert [one["n"] for one in traces.of_kind(found, "grow")] == list(
        range(1, len(found) - 1)
    )
    assert (found[-1]["k"], found[-1]["reason"]) == ("end", AT_ITS_SIZE)
    (line,) = said
    assert f"the trace ends at its size, 1 MiB: {file}" in line


class Stands:
    """A disk that takes the header, and then nothing until it may."""

    def __init__(self, writer: TraceWriter) -> None:
        wait_until(lambda: traces.size_bytes(writer.folder))
        self.goes_on = threading.Event()
        self._stands = threading.Event()
        self._flush = writer.output.flush
        writer.output.flush = self._wait  # type: ignore[method-assign]
        writer.put(grow(writer, 0))
        assert self._stands.wait(20)

    def _wait(self) -> None:
        self._stands.set()
        assert self.goes_on.wait(20)
        self._flush()


def test_a_disk_that_does_not_keep_up_ends_the_trace_and_that_is_said(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_WAITING", 100)
    writer = TraceWriter(tmp_path, header())
    disk = Stands(writer)
    for number in range(1, 107):
        writer.put(grow(writer, number))
    assert writer.ended
    (line,) = said
    assert (
        f"tracing has ended, training goes on: 100 records wait for {tmp_path}" in line
    )
    disk.goes_on.set()
    wait_until(lambda: writer.output._descriptor < 0)  # type: ignore[union-attr]
    found = traces.records(*traces.files(tmp_path))
    assert traces.kinds(found) == ["header", *["grow"] * 101, "end"]
    assert found[-1]["reason"] == f"100 records wait for {tmp_path}"


def test_a_disk_that_does_not_answer_holds_up_the_exit_no_longer_than_the_limit(
    tmp_path: Path, said: list[str]
) -> None:
    writer = TraceWriter(tmp_path, header())
    disk = Stands(writer)
    start = time.monotonic()
    writer.close(timedelta(seconds=0.2))
    assert time.monotonic() - start < 5
    (line,) = said
    assert "the trace has no end" in line and str(tmp_path) in line
    disk.goes_on.set()


def test_a_folder_that_cannot_be_written_is_said_once_and_nothing_is_raised(
    tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "file").touch()
    writer = TraceWriter(tmp_path / "file" / "folder", header())
    wait_until(lambda: writer.ended)
    for number in range(3):
        writer.put(grow(writer, number))
    writer.close(LIMIT)
    (line,) = said
    assert (
        "tracing has ended, training goes on" in line and str(tmp_path / "file") in line
    )
    assert "[rank " in line


def test_a_file_that_somebody_removes_ends_the_trace_and_that_is_said(
    tmp_path: Path, said: list[str]
) -> None:
    writer = TraceWriter(tmp_path / "folder", header())
    wait_until(lambda: traces.files(tmp_path / "folder"))
    shutil.rmtree(tmp_path / "folder")
    for number in range(3):
        writer.put(grow(writer, number))
    wait_until(lambda: writer.ended)
    (line,) = said
    assert (
        "tracing has ended, training goes on" in line
        and "jsonl: it was removed" in line
    )


def test_an_error_of_the_tracers_is_said_once_and_records_no_more(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[torch.nn.Module]()

    def fails(encoder: torch.nn.Module) -> None:
        calls.append(encoder)
        raise KeyError("a bug")

    recorder = Recorder(Settings(trace=tmp_path))
    monkeypatch.setattr(recorder, "_state_of", fails)
    for _ in range(3):
        recorder.encoder_grew(torch.nn.Identity(), 1, 2)
    (line,) = said
    assert "tracing has ended: an error of its own" in line and "a bug" in line
    assert recorder.where()


def recorded_class(forward: Any) -> Any:
    name, replacement = recorded_forward.record_forward(forward)
    return type("Encoder", (torch.nn.Module,), {name: forward, "forward": replacement})


def test_a_call_by_position_in_any_class(tmp_path: Path) -> None:
    def forward(
        self: Any, features: torch.Tensor, features_length: torch.Tensor
    ) -> torch.Tensor:
        return features

    encoder = recorded_class(forward)()
    tracing.start(Settings(trace=tmp_path))
    encoder(torch.ones(2, 9), torch.tensor([9, 3]))
    tracing.stop()
    found = traces.records(*traces.files(tmp_path))
    assert traces.kinds(found)[1:] == ["enter", "leave", "end"]
    assert (found[1]["shape"], found[1]["e"], found[1]["device"]) == (
        [2, 9],
        "Encoder",
        "cpu",
    )
    assert found[-1]["reason"].startswith("revert()")


def test_an_error_of_the_recorders_is_said_once_and_does_not_reach_the_call(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(
        self: Any, audio_signal: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        return audio_signal + length

    def broken(self: TraceWriter, record: Timed) -> None:
        raise KeyError("a bug")

    encoder = recorded_class(forward)()
    tracing.start(Settings(trace=tmp_path))
    monkeypatch.setattr(TraceWriter, "put", broken)
    try:
        for _ in range(3):
            assert encoder(torch.ones(2), length=torch.ones(2)).tolist() == [2, 2]
        assert "an error of its own" in tracing.where()
    finally:
        monkeypatch.undo()
        tracing.stop()
    (line,) = said
    assert "tracing has ended: an error of its own, please report it: KeyError" in line
    assert traces.kinds(traces.records(*traces.files(tmp_path))) == ["header", "end"]


def test_a_trace_for_a_person_is_a_line_before_and_a_line_after_each_call(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(
        self: Any, audio_signal: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        if len(length) > 2:
            raise ValueError("too many")
        return audio_signal * 2

    monkeypatch.chdir(tmp_path)
    encoder = recorded_class(forward)()
    tracing.start(Settings.resolve(environment={"NEMO_PATCHES_TRACE": "-"}))
    assert tracing.recorder is not None
    assert str(tracing.recorder.settings).endswith(
        "; trace=-"
    ) and tracing.where().startswith("not begun")
    encoder(torch.ones(2, 3, 4), torch.tensor([4, 3]))
    with pytest.raises(ValueError, match="too many"):
        encoder.eval()(torch.ones(1, 3, 4), torch.tensor([4, 3, 2]))
    assert tracing.where() == "-"
    tracing.stop()
    begins, done, second, raised = capsys.readouterr().err.splitlines()
    who = (
        rf"\d\d:\d\d:\d\d nemo_patches \[rank 0/1 {re.escape(socket.gethostname())}\]"
        r" Encoder: call"
    )
    assert re.fullmatch(
        rf"{who} 1 begins: training, signal \[2, 3, 4\] float32 on cpu", begins
    )
    assert re.fullmatch(rf"{who} 1 is done: output \[2, 3, 4\], \d\.\d+ s", done)
    assert re.match(rf"{who} 2 begins: evaluation, ", second)
    assert re.fullmatch(rf"{who} 2 has raised ValueError: too many", raised)
    assert list(tmp_path.iterdir()) == []


# What follows is of whole processes: an encoder of three lines, recorded as a target is.

ENCODER = """
import os, signal, sys, time
from pathlib import Path
import torch
from nemo_patches.tracing import recorded_forward
from nemo_patches.tracing.recorder import Recorder, tracing
from nemo_patches.sync.settings import Settings
folder = Path(sys.argv[1])
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    def forward(self, audio_signal, length):
        return self.layers[0](audio_signal), length
original = Encoder.forward
name, Encoder.forward = recorded_forward.record_forward(original)
setattr(Encoder, name, original)
encoder = Encoder()
def call():
    return encoder(audio_signal=torch.ones(2, 3, 4), length=torch.tensor([4, 3]))
tracing.start(Settings(trace=folder))
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=200)
    finally:
        process.kill()


# Forks one interpreter for each program, since importing torch takes longer than they do; each ends
# as any interpreter does.
FORKS = """
import json, os, sys
import torch._dynamo, torch.distributed
jobs = json.load(sys.stdin)
children = []
for name, job in jobs.items():
    if (child := os.fork()) == 0:
        for file, descriptor in (("out", 1), ("error", 2)):
            os.dup2(os.open(job[file], os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.update(job["variables"])
        sys.argv[1:] = [job["folder"]]
        break
    children.append((name, child))
else:
    codes = {name: (child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for name, child in children}
    print(json.dumps(codes))
    sys.exit()
exec(job["program"])
"""


@dataclass(frozen=True)
class Done:
    pid: int
    code: int
    out: str
    error: str


def forked(
    base: Path, programs: Mapping[str, str], **variables: str
) -> dict[str, Done]:
    """Each program's end; its folder has its name."""
    jobs = {
        name: {
            "program": ENCODER + program,
            "folder": str(base / name),
            "variables": variables,
            "out": str(base / f"{name} out"),
            "error": str(base / f"{name} error"),
        }
        for name, program in programs.items()
    }
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(jobs),
        stdout=subprocess.PIPE,
        text=True,
        env=inherited,
        timeout=200,
        check=True,
    )
    return {
        name: Done(
            pid,
            code,
            (base / f"{name} out").read_text(),
            (base / f"{name} error").read_text(),
        )
        for name, (pid, code) in json.loads(done.stdout).items()
    }


# The program's last lines, its exit code, and what the end record says of the error and the exit
# code
ENDINGS = {
    "sys.exit": ("sys.exit(7)", 7, ("", None)),
    "exception": (
        "raise KeyError('the user\\'s own')",
        1,
        ('KeyError: "the user\'s own"', 1),
    ),
    "caught": (  # by whoever called Lightning's trainer: training goes on
        "tracing.recorder.trainer_failed(ValueError('caught'))\ncall()",
        0,
        ("", None),
    ),
    # Makes an exit of it, whose code nobody tells; somebody else may have caught it, and exit with
    # 0
    "hydra": (
        "tracing.recorder.trainer_failed(ValueError('no such audio'))\nsys.exit(1)",
        1,
        ("ValueError: no such audio", None),
    ),
    "before any call": (
        (
            "tracing.stop()\ntracing.start(Settings(trace=folder /"
            " 'again'))\ntracing.recorder.trainer_failed(ValueError('no such"
            " audio'))\nraise ValueError('no such audio')"
        ),
        1,
        ("ValueError: no such audio", 1),
    ),
    "multiprocessing": (  # a forked process leaves without the interpreter's exit
        (
            "tracing.stop()\n"
            "import multiprocessing\n"
            "def rank():\n"
            "    tracing.start(Settings(trace=folder))\n"
            "    call()\n"
            "process = multiprocessing.get_context('fork').Process(target=rank)\n"
            "process.start(); process.join(30); sys.exit(process.exitcode)"
        ),
        0,
        ("", None),
    ),
    "spawn": (  # as torch.multiprocessing.spawn's processes end
        (
            "tracing.stop()\n"
            "import multiprocessing\n"
            "def rank():\n"
            "    tracing.start(Settings(trace=folder))\n"
            "    call()\n"
            "    try:\n"
            "        raise ValueError('no such audio')\n"
            "    except ValueError:\n"
            "        sys.exit(3)\n"
            "process = multiprocessing.get_context('fork').Process(target=rank)\n"
            "process.start(); process.join(30); sys.exit(process.exitcode)"
        ),
        3,
        ("ValueError: no such audio", 3),
    ),
}


def test_every_exit_of_the_interpreter_ends_the_file_and_says_how(
    tmp_path: Path,
) -> None:
    programs = {name: f"call()\n{ending}" for name, (ending, _, _) in ENDINGS.items()}
    for name, done in forked(tmp_path, programs, RANK="5", WORLD_SIZE="6").items():
        assert done.code == ENDINGS[name][1], done.error
        for file in traces.files(tmp_path / name):
            found = traces.records(file)
            call = ["enter", "leave"]
            stopped = (
                name in ("multiprocessing", "spawn", "before any call")
                and found[0]["pid"] == done.pid
            )
            raised = traces.of_kind(found, "raised")
            last = ["raised"] * len(raised) + call * (name == "caught")
            assert traces.kinds(found) == ["header", *call, *last, "end"]
            assert (found[0]["rank"], found[0]["world_size"]) == (5, 6)
            assert bool(found[-1]["reason"]) == stopped
            if not stopped:
                assert (found[-1]["error"], found[-1]["exit_code"]) == ENDINGS[name][
                    2
                ], name
                said = {"exception": "KeyError", "sys.exit": "", "multiprocessing": ""}
                assert [one["type"] for one in raised] == (
                    [kind] if (kind := said.get(name, "ValueError")) else []
                )
                assert not raised or raised[0]["traceback"].startswith(
                    ("Traceback", "ValueError")
                )
                assert [(one["e"], one["n"]) for one in raised] in ([], [("", 0)])
    assert len(traces.files(tmp_path / "multiprocessing")) == 2


def test_a_killed_process_leaves_whole_lines_up_to_its_last_moments(
    tmp_path: Path,
) -> None:
    calls = (
        "for _ in range(60): call()\n"
        "print('called', flush=True)\n"
        "while not (folder / 'on').exists(): time.sleep(0.01)\n"
        "while True:\n    call()\n    time.sleep(0.003)\n"
    )
    process = start(ENCODER + calls, tmp_path)
    assert process.stdout is not None

    def done() -> list[int]:
        found = [traces.records(file, cut=True) for file in traces.files(tmp_path)]
        return [one["n"] for file in found for one in traces.of_kind(file, "leave")]

    try:
        process.stdout.readline()
        wait_until(lambda: len(done()) == 60)  # while it makes no other call
        (tmp_path / "on").touch()
        wait_until(lambda: len(done()) > 80)
    finally:
        process.send_signal(signal.SIGKILL)
        end(process)
    assert done() == list(range(1, len(done()) + 1))
    found = traces.records(*traces.files(tmp_path), cut=True)
    assert not traces.of_kind(found, "end")


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for _ in range(500):
    call()
    time.sleep(0.0005)
limit = time.monotonic() + 60
while not tracing.where().startswith("ended") and time.monotonic() < limit:
    time.sleep(0.01)
call()
print("trained")
print(tracing.where())
"""


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    done = forked(tmp_path, {"full": FULL}, RANK="2", WORLD_SIZE="4")["full"]
    assert done.code == 0, done.error
    assert done.out.splitlines() == ["trained", f"ended: {tmp_path / 'full'}"]
    (line,) = done.error.splitlines()
    assert (
        "tracing has ended, training goes on" in line
        and "[rank 2/4 " in line
        and "too large" in line.lower()
    )
    assert len(traces.records(*traces.files(tmp_path / "full"), cut=True)) > 50


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


def test_neither_forked_children_nor_loader_workers_write_into_a_ranks_file(
    tmp_path: Path,
) -> None:
    done = forked(tmp_path, {"rank": CHILDREN}, RANK="1", WORLD_SIZE="2")["rank"]
    assert done.code == 0, done.error
    pid, child = map(int, done.out.split())
    assert (
        done.error.count("tracing has ended: a data loader's worker is not recorded")
        == 1
    )
    found = [traces.records(file) for file in traces.files(tmp_path / "rank")]
    by_pid = {(one[0]["pid"], one[0]["rank"]): one for one in found}
    assert set(by_pid) == {(pid, 1), (child, 1), (pid, 0)}
    assert [one["n"] for one in traces.of_kind(by_pid[pid, 1], "leave")] == [1, 2]
    assert [one["n"] for one in traces.of_kind(by_pid[child, 1], "leave")] == [1]
    # Under its process group it was another rank, and its next process group changed nothing.
    assert [one["n"] for one in traces.of_kind(by_pid[pid, 0], "leave")] == [1, 2]
    assert by_pid[pid, 1][-1]["reason"] == "this process is rank 0 of 1 from now on"
    assert by_pid[pid, 0][-1]["k"] == "end"
