"""Rank 0, which hosts the job's store, ends first: the others say that it has left, and c10d logs
nothing for us.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_programs import Server, forking
from ranks import free_port

LIMIT_S = 200
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone, pytest.mark.timeout(2 * LIMIT_S)]

PROGRAM = """
import datetime, os, signal, sys, time
rank, port, ending, folder = int(sys.argv[1]), *sys.argv[2:]
os.environ.update(RANK=str(rank), WORLD_SIZE="3")
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
from nemo_patches.watch import subscriber
from nemo_patches.sync.length_sync import synced_length, use
from nemo_patches.sync.settings import Settings

def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

subscriber.subscribe()
use(Settings(timeout=datetime.timedelta(seconds=60)))
encoder = torch.nn.Linear(1, 1)
for _ in range(3):
    synced_length(encoder, 1)
wait_until(lambda: subscriber.monitor() and subscriber.monitor().exchange.is_whole)
dist.barrier()
if rank == 0:
    if ending == "exception":
        raise KeyError("the user's own")
    if ending == "group destroyed":
        dist.destroy_process_group()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)
synced_length(encoder, 2)
wait_until(subscriber.stalls)
open(f"{folder}/said-{rank}", "w").close()
wait_until(lambda: all(os.path.exists(f"{folder}/said-{other}") for other in (1, 2)))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with forking(LIMIT_S) as server:
        yield server


def stderr_of_others(server: Server, ending: str, folder: Path) -> list[str]:
    port = str(free_port())
    arguments = ([str(rank), port, ending, str(folder)] for rank in range(3))
    _, *others = server.run(PROGRAM, folder, *arguments)
    assert [one.code for one in others] == [0, 0], [one.error for one in others]
    return [one.error for one in others]


def ended_and_gone(lines: list[str]) -> list[str]:
    """Two threads log them."""
    return sorted(lines, key=lambda line: ": gone: " in line)


@pytest.mark.parametrize(
    "ending", ["end of the program", "group destroyed", "exception"]
)
def test_the_others_say_that_rank_0_has_left(
    ending: str, server: Server, tmp_path: Path
) -> None:
    for stderr in stderr_of_others(server, ending, tmp_path):
        ended, gone = ended_and_gone(stderr.splitlines())
        assert ended.endswith(
            ": rank 0 has left: it ended, or destroyed its process group"
        )
        assert "Linear: gone: rank 0 of 3 | rank 0 (" in gone
        assert ") has left: it ended, or destroyed its process group" in gone
        assert "its process has gone" not in gone


def test_a_rank_0_that_is_killed_has_not_left(server: Server, tmp_path: Path) -> None:
    for stderr in stderr_of_others(server, "killed", tmp_path):
        # c10d may log its frames: who is killed in the middle of an answer resets the connection of
        # whoever asks
        own = [line for line in stderr.splitlines() if " nemo_patches " in line]
        ended, gone = ended_and_gone(own)
        assert ended.endswith(": rank 0 has ended: its port is closed")
        assert "rank 0 (" in gone and "): its process has gone" in gone
