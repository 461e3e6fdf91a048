"""When a dump comes and when it does not: exceptions, signals that others handle, forked children, bad folders.

The processes are real; their encoder has a length sync and no layers, so that NeMo need not be imported.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import interpreters
import pytest
import traces
from diagnosing import diagnosed
from ranks import free_port

from nemo_patches.stall.job_folder import dump_folder, job_name

pytestmark = [pytest.mark.one_nemo, pytest.mark.apply_only]
LIMIT_S = 120.0

RANK = """
import os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from nemo_patches.stall import subscriber
from nemo_patches.sync import length_sync
from nemo_patches.sync.encoder_methods import make_bounded_update
from nemo_patches.sync.settings import Settings
from nemo_patches.tracing.dump import dumps

class Encoder(torch.nn.Module):
    max_audio_length = 5000
    update = make_bounded_update(lambda *_: None, lambda *_: None, lambda: True)

    def forward(self, length, error=None):
        self.update(length, None)
        if error is not None:
            raise error

def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.01)

def users_hook(kind, error, trace):
    print("the user's hook:", error, flush=True)

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.excepthook = users_hook
length_sync.use(Settings(timeout=timedelta(seconds=float(sys.argv[4]))))
subscriber.subscribe()
dumps.start(folder if folder != "default" else None)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
encoder = Encoder()
for _ in range(3):
    encoder(100)
"""


def run_ranks(
    program: str, folder: Path | str, timeout_s: float = 30.0, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    port = str(free_port())
    processes = []
    try:
        for rank in range(2):
            command = [sys.executable, "-c", RANK + program, str(rank), port, str(folder), str(timeout_s)]
            environment = interpreters.environment(interpreters.CHECKOUT, **variables)
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


FAILS = """
if rank == 1:
    {failure}
try:  # rank 1 has gone: the length sync ends, which is reported
    while not list(Path(folder).glob("rank-00000*")):
        encoder(100)
        time.sleep(0.05)
finally:
    print("went on", flush=True)
os._exit(0)  # without a store, without rank 1
"""


@pytest.mark.parametrize(
    ("failure", "finding", "text"),
    [
        ("encoder(100, ValueError('no such audio'))", "exception", "in call 4 of Encoder"),
        (
            "raise ValueError('no such audio')",
            "exception",
            "outside the encoder, after call 3 of Encoder",
        ),
    ],
    ids=["inside the encoder", "outside"],
)
def test_an_exception_that_nobody_catches(failure: str, finding: str, text: str, tmp_path: Path) -> None:
    healthy, failed = run_ranks(FAILS.format(failure=failure), tmp_path)
    assert (healthy.returncode, healthy.stdout) == (0, "went on\n"), healthy.stderr
    assert (failed.returncode, failed.stdout) == (1, "the user's hook: no such audio\n"), failed.stderr
    for file in traces.files(tmp_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = diagnosed(tmp_path).findings[0]
    assert (first.id, first.ranks) == (finding, (1,))
    assert text in first.text
    (line,) = [line for line in failed.stderr.splitlines() if "encoder calls of this rank are in" in line]
    assert f"{tmp_path}/rank-00001." in line


UNDER_HYDRA = """
if rank == 1:
    from nemo_patches.tracing.trainer_exceptions import TrainerExceptions
    TrainerExceptions().on_exception(None, None, SystemExit(0))
    TrainerExceptions().on_exception(None, None, ValueError("no such audio"))
    sys.exit(1)
os._exit(0)
"""


def test_an_exception_that_hydra_turns_into_an_exit_is_dumped_by_the_callback(tmp_path: Path) -> None:
    # Lightning's import starts dumps as the environment says.
    _, failed = run_ranks(UNDER_HYDRA, tmp_path, NEMO_PATCHES_DUMP=str(tmp_path))
    assert failed.returncode == 1, failed.stderr
    (file,) = traces.files(tmp_path)
    found = traces.records(file)
    assert traces.kinds(found) == ["header", "encoder", "call", "call", "call", "failed", "dumped"]
    assert found[-1]["error"] == "ValueError: no such audio"


ASKED = """
def asked():
    os.kill(os.getpid(), signal.SIGUSR2)

other = Encoder()
other(600)
thread = threading.Thread(target=other, args=(700,))
if rank == 0:
    thread.start()
    wait_until(lambda: dumps._recent.in_length_sync)
encoder(100)  # while another thread is in the other one's length sync
if rank == 1:
    thread.start()
thread.join()
calls = [(one.e, one.local) for one in dumps._recent.records(None) if type(one).__name__ == "Call"]
assert sorted(calls) == [(1, 100)] * 4 + [(2, 600), (2, 700)], calls

asked()
wait_until(lambda: dumps.file and dumps.file.exists())
first = dumps.file.read_bytes()
encoder(100)
asked()
wait_until(lambda: dumps.file.read_bytes() != first)
assert len(list(Path(folder).glob(f"rank-{rank:05}.*"))) == 1  # the second took the first one's place

before = dumps.file.read_bytes()
child = os.fork()
if child == 0:
    dumps.process_ends(ValueError("in a child"))
    os.kill(os.getpid(), signal.SIGUSR2)  # as it ends any process that does not care
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
time.sleep(0.2)  # in which a dump would come
assert dumps.file.read_bytes() == before

dumps.stop()
assert not [thread for thread in threading.enumerate() if thread.name == "nemo_patches dump"]
sys.excepthook(ValueError, ValueError("after a revert"), None)
assert dumps.file.read_bytes() == before
files = set(os.listdir("/proc/self/fd"))
dumps.start(folder)
dumps.stop()
wait_until(lambda: set(os.listdir("/proc/self/fd")) <= files)
dist.barrier()

dumps.start(folder)
stack_size = threading.stack_size(1 << 50)  # no thread can be started
encoder(100)
sys.excepthook(ValueError, ValueError("no dump, and no wait for one"), None)
dumps.stop()
assert dumps.file.read_bytes() == before
threading.stack_size(stack_size)

dumps.start(folder)
encoder(100)
dist.barrier()
dist.destroy_process_group()
wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "nemo_patches dump"])
sys.excepthook(ValueError, ValueError("after the process group"), None)
assert b"after the process group" in dumps.file.read_bytes()
"""


def test_again_and_again_but_not_in_a_child_nor_after_a_revert(tmp_path: Path) -> None:
    for rank in run_ranks(ASKED, tmp_path):
        assert rank.returncode == 0, rank.stdout + rank.stderr
        assert "error of its own" not in rank.stderr
        assert rank.stderr.count("cannot be dumped, training goes on: can't start new thread") == 1


CANNOT = """
for _ in range(2):
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.3)  # longer than it gathers signals
os.kill(os.getpid(), signal.SIGUSR2)
wait_until(lambda: dumps._failed)
encoder(100)
dist.barrier()
"""


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for rank in run_ranks(CANNOT, tmp_path / "file" / "folder"):
        assert rank.returncode == 0, rank.stdout + rank.stderr
        (line,) = [line for line in rank.stderr.splitlines() if "cannot be dumped" in line]
        assert f"training goes on: {tmp_path}/file/folder: Not a directory" in line


NO_FILES = """
import os, resource, sys
from nemo_patches.tracing.dump import dumps
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # standard input, output and error
dumps.start(sys.argv[1])
dumps.start(sys.argv[1])
dumps.process_ends(ValueError("no dump, and no wait for one"))
dumps.stop()
"""


def test_a_process_that_has_no_files_left_goes_on_without_dumps_and_says_so(tmp_path: Path) -> None:
    done = interpreters.python("-c", NO_FILES, str(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cannot be dumped, training goes on" in line]
    assert "Too many open files" in line


OTHERS = """
import asyncio, ctypes, faulthandler, os, signal, sys
from nemo_patches.tracing.dump import dumps

PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, "asr_训练脚本".encode())  # as a script of that name; cut within its last letter

def ask():
    os.kill(os.getpid(), signal.SIGUSR2)

seen = []
def users(*_):
    seen.append(1)

signal.signal(signal.SIGUSR2, users)  # before us
dumps.start(sys.argv[1])
assert signal.getsignal(signal.SIGUSR2) is users
ask()
assert seen == [1]
dumps.stop()
assert signal.getsignal(signal.SIGUSR2) is users
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
dumps.start(sys.argv[1])
ask()
dumps.stop()
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN

signal.signal(signal.SIGUSR2, signal.SIG_DFL)
stacks = open(sys.argv[2], "w+")
faulthandler.register(signal.SIGUSR2, file=stacks)  # Python's own getsignal() does not tell of this
dumps.start(sys.argv[1])
ask()
dumps.stop()
ask()
stacks.seek(0)
assert stacks.read().count("most recent call first") == 2
faulthandler.unregister(signal.SIGUSR2)

dumps.start(sys.argv[1])
ask()  # before the first encoder call: nothing to dump, and no reason to end

async def loop():  # after us
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, came.set)
    ask()
    await asyncio.wait_for(came.wait(), 30)
    dumps.stop()
    came.clear()
    ask()
    await asyncio.wait_for(came.wait(), 30)

asyncio.run(loop())
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL

def later(kind, error, trace):
    print("later hook:", error)
    before(kind, error, trace)

dumps.start(sys.argv[1])
before, sys.excepthook = sys.excepthook, later
dumps.stop()
assert sys.excepthook is later
raise ValueError("the end")
"""


def test_what_others_have_put_into_the_process_stays(tmp_path: Path) -> None:
    done = interpreters.python(
        "-c", OTHERS, str(tmp_path / "dumps"), str(tmp_path / "stacks"), path=(interpreters.CHECKOUT,)
    )
    assert (done.returncode, done.stdout) == (1, "later hook: the end\n"), done.stderr
    assert done.stderr.endswith("ValueError: the end\n")
    assert not (tmp_path / "dumps").exists()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../my job")
    return tmp_path


DEFAULT = """
if rank == 0:
    encoder(100)  # alone: reported after the timeout
    wait_until(lambda: dumps.file)
    print(dumps.file, port)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until(lambda: dumps.file)
    print(dumps.file, port)
dist.barrier()
"""


def test_by_default_both_ranks_dump_into_the_jobs_folder(tmp_path: Path) -> None:
    ranks = run_ranks(DEFAULT, "default", 1.5, TMPDIR=str(tmp_path))
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0, rank.stderr
        file, port = rank.stdout.split()
        assert Path(file).parent == tmp_path / f"nemo_patches-{os.getuid()}" / f"port-{port}"
        assert Path(file).name.startswith(f"rank-{number:05}.")
        assert len([line for line in rank.stderr.splitlines() if file in line]) == 1
    lines = ranks[0].stderr.splitlines()
    stall, dump = (
        next(place for place, line in enumerate(lines) if text in line)
        for text in (
            "not every rank's length came",
            "a stall was reported: the last 4 encoder calls of this rank are in",
        )
    )
    assert stall < dump


def test_the_jobs_folder_is_its_owners_alone(temporary: Path) -> None:
    folder = dump_folder(None, 0)
    assert folder == temporary / f"nemo_patches-{os.getuid()}" / "___my_job"
    assert dump_folder(None, 0) == folder
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_a_folder_that_somebody_else_has_put_there_is_refused(temporary: Path) -> None:
    mine = temporary / f"nemo_patches-{os.getuid()}"
    (temporary / "elsewhere").mkdir(mode=0o700)
    mine.symlink_to(temporary / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder that this user alone may read; give another one as NEMO_"):
        dump_folder(None, 0)
    mine.unlink()
    mine.mkdir()
    mine.chmod(0o777)
    with pytest.raises(PermissionError):
        dump_folder(None, 0)
    assert list((temporary / "elsewhere").iterdir()) == list(mine.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "a7", "SLURM_JOB_ID": "8"}, "a7"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "8"}, "torchrun-77"),  # torchrun's default
        ({"SLURM_JOB_ID": "8"}, "8"),
        ({}, "port-2950"),
    ],
)
def test_a_job_has_a_name_that_all_its_ranks_know(environment: dict[str, str], name: str) -> None:
    assert job_name(environment, 2950, 77) == name
