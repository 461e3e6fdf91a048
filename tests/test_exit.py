"""How an interpreter ends while a round is pending: as fast as stock's, with the exit code it had,
and no abort.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_programs import Ended, Server, forking
from ranks import free_port

# Seconds, for a program: on a vendored NeMo it imports all of NeMo, on a busy machine for minutes
LIMIT = 240.0

# Of Gloo and processes, not of NeMo's version.
pytestmark = [
    pytest.mark.one_nemo,
    pytest.mark.alone,
    pytest.mark.timeout(4 * LIMIT + 60),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with forking(int(LIMIT)) as server:
        yield server


PROGRAM = """
import datetime, os, sys, time
import torch, torch.distributed as dist
rank, port, ending, done = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=120))
from nemo_patches.sync.length_sync import synced_length, use
from nemo_patches.sync.settings import Settings
short = Settings(timeout=datetime.timedelta(seconds=0.3))
use(short if ending == "never connected" else Settings(timeout=datetime.timedelta(seconds=120)))
encoder = torch.nn.Linear(1, 1)
if rank == 1:
    if ending not in ("never connected", "stock"):
        synced_length(encoder, 1)
    while not os.path.exists(done):  # rank 0 has ended
        time.sleep(0.01)
    os._exit(0)
if ending != "stock":
    synced_length(encoder, 1)
    use(short)
    synced_length(encoder, 2)  # rank 1 never makes this call: the round stays pending
if ending == "encoder dropped":
    del encoder
if ending == "group destroyed":
    dist.destroy_process_group()
print(time.time(), flush=True)
if ending == "exception":
    raise KeyError("the user's own")
sys.exit(7)
"""

ENDINGS = (
    "pending",
    "never connected",
    "encoder dropped",
    "group destroyed",
    "exception",
)


def seconds_to_exit(
    server: Server, ending: str, folder: Path
) -> tuple[float, int, str]:
    """From the program's last line to the end of its process; its exit code and its stderr."""
    port, done = str(free_port()), str(folder / "done")
    arguments = ([str(rank), port, ending, done] for rank in (0, 1))
    first, _ = server.run(PROGRAM, folder, *arguments)
    assert first.out, first.error
    return first.at - float(first.out), first.code, first.error


@pytest.fixture(scope="module")
def stock(server: Server, tmp_path_factory: pytest.TempPathFactory) -> float:
    seconds, code, _ = seconds_to_exit(
        server, "stock", tmp_path_factory.mktemp("stock")
    )
    assert code == 7
    return seconds


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_with_a_pending_round_is_as_fast_as_stocks(
    ending: str, server: Server, stock: float, tmp_path: Path
) -> None:
    ours, code, error = seconds_to_exit(server, ending, tmp_path)
    # A hang lasts for minutes; on a vendored NeMo most of it is its own end.
    assert ours < 2 * stock + 15
    assert code == (1 if ending == "exception" else 7), error
    assert "Exception ignored" not in error
    assert "terminate called" not in error
    assert ("the user's own" in error) == (ending == "exception")


HALF_CONNECTED = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from nemo_patches.channel.exchange import Exchange
server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
rounds = Exchange(lambda: server, 0, 2, print).rounds("encoder")
rounds.issue(5)  # rank 1 has died before it registered
assert rounds.wait(timedelta(seconds=1)) is None
print(time.time(), flush=True)
sys.exit(7)
"""


def test_exit_while_a_rank_that_died_before_it_connected_is_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HALF_CONNECTED],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 7, done.stderr
    # A hang would last for the test's limit. A vendored runtime brings all of NeMo, whose own end
    # takes 3 s.
    assert time.time() - float(done.stdout) < 40


SERVER = """
import sys
import torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
sys.stdin.read()
"""

ANSWERED_LATE = """
import os, sys, time
import torch.distributed as dist
from nemo_patches.channel.exchange import Exchange
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
print("connected", flush=True)
os.read(0, 1)  # the server is stopped
asked = []

class Asked(dist.PrefixStore):
    def check(self, keys):
        asked.append(keys)
        return super().check(keys)

class Finalizing:  # what is left in sys.modules goes late, without Python's lock in these calls
    def __del__(self, write=os.write, read=os.read):
        write(1, b"finalizing\\n")
        read(0, 1)

sys.modules["finalizing"] = Finalizing()
part = Asked("group", store)
exchange = Exchange(lambda: part, 1, 2, lambda text: None)
exchange.start()
while not asked:
    time.sleep(0.01)
time.sleep(0.2)  # for the request to be on its way
sys.exit(7)
"""


def test_an_answer_while_the_interpreter_finalizes_does_not_abort_it() -> None:
    """The server is stopped when the process ends, and goes on while it does."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True
    )
    ending = None
    try:
        port = read_line(server)
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        command = [sys.executable, "-c", ANSWERED_LATE, port]
        ending = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
        assert read_line(ending) == "connected"
        server.send_signal(signal.SIGSTOP)
        write(ending)
        assert read_line(ending) == "finalizing"
        server.send_signal(signal.SIGCONT)
        store.add("it has answered", 1)
        time.sleep(0.3)  # for the thread to return, if it does
        write(ending)
        _, error = ending.communicate(timeout=LIMIT)
        assert ending.returncode == 7, error
        assert "terminate called" not in error
    finally:
        server.kill()
        server.communicate(timeout=LIMIT)
        if ending is not None:
            ending.kill()
            ending.communicate(timeout=LIMIT)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write(process: subprocess.Popen[str]) -> None:
    """What it waits for; it may have ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()


KILLED = """
import datetime, multiprocessing, os, signal, sys, time
import torch, torch.distributed as dist

def train(rank, port, ending):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
                            timeout=datetime.timedelta(seconds=120))
    from nemo_patches.watch import subscriber
    subscriber.subscribe()
    while subscriber.monitor() is None or not subscriber.monitor().exchange.is_whole:
        time.sleep(0.01)
    number = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(number)
    if ending == "healthy":
        dist.barrier()
        return
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(number)
    except RuntimeError:
        if ending == "sys.exit":
            sys.exit(3)
        raise

if __name__ == "__main__":
    rank, port, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if ending in ("fork", "spawn"):
        context = multiprocessing.get_context(ending)
        child = context.Process(target=train, args=(rank, port, ending))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    train(rank, port, ending)
"""
EXIT_CODES = {"exception": 1, "sys.exit": 3, "fork": 1, "spawn": 1, "healthy": 0}


@pytest.fixture(scope="module")
def killed(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Ended]]:
    """By how the others end: the three ranks of a job. All jobs are beside each other."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = []
    for ending in EXIT_CODES:
        port = str(free_port())
        arguments += [
            [str(rank), port, ending, str(folder / "done")] for rank in range(3)
        ]
    ended = server.run(KILLED, folder, *arguments)
    jobs = [ended[first : first + 3] for first in range(0, len(ended), 3)]
    return dict(zip(EXIT_CODES, jobs, strict=True))


@pytest.mark.parametrize("ending", EXIT_CODES)
def test_a_rank_that_was_killed_is_named_at_the_others_exit_however_they_end(
    ending: str, killed: dict[str, list[Ended]]
) -> None:
    for rank in (killed[ending][0], killed[ending][2]):
        assert rank.code == EXIT_CODES[ending], rank.error
        said = [line for line in rank.error.splitlines() if "gone: " in line]
        if ending == "healthy":
            assert said == []
        else:
            (line,) = said
            assert "gone: rank 1 of 3 | rank 1 (" in line
            assert "its process has gone" in line
