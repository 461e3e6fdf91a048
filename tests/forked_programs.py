"""Interpreters that have torch, forked from one that has imported it; they import ours by themselves,
and each ends as any interpreter does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A request: a program's file, its arguments by rank, what to make when the first rank has ended, and
# the limit in seconds.
SERVER = """
import json, os, signal, sys, time
import torch, torch.distributed

for line in sys.stdin:
    path, arguments, done, limit_s = json.loads(line)
    ranks = []
    for number, own in enumerate(arguments):
        if (rank := os.fork()) == 0:
            break
        ranks.append(rank)
    else:
        ends = []
        for rank in ranks:
            code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
            ends.append((rank, code, time.time()))
            open(done, "w").close()
        print(json.dumps(ends), flush=True)
        continue
    signal.alarm(limit_s)
    for descriptor, name in ((0, "/dev/null"), (1, f"{path}.out{number}"), (2, f"{path}.err{number}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
    __file__, sys.argv = path, [path, *own]  # for what multiprocessing spawns
    exec(compile(open(path).read(), path, "exec"))
    break
"""


@dataclass(frozen=True)
class Ended:
    """at: time.time() when the process was gone."""

    pid: int
    code: int
    at: float
    out: str
    error: str


class Server:
    """limit_s: for a program."""

    def __init__(self, limit_s: int) -> None:
        self.limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True
        )

    def run(self, program: str, folder: Path, *arguments: list[str]) -> list[Ended]:
        """One process for each list of arguments; folder/done is there once the first has ended."""
        path = folder / "program.py"
        path.write_text(program)
        assert self._process.stdin is not None and self._process.stdout is not None
        request = json.dumps([str(path), arguments, str(folder / "done"), self.limit_s])
        print(request, file=self._process.stdin, flush=True)
        return [
            Ended(
                pid,
                code,
                at,
                Path(f"{path}.out{number}").read_text(),
                Path(f"{path}.err{number}").read_text(),
            )
            for number, (pid, code, at) in enumerate(
                json.loads(self._process.stdout.readline())
            )
        ]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=self.limit_s)


@contextlib.contextmanager
def forking(limit_s: int) -> Iterator[Server]:
    server = Server(limit_s)
    try:
        yield server
    finally:
        server.end()
