"""A job on made hosts, as a test sees it: its steps, what its ranks say, whom they name."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ranks

from hosts.cluster import CARD, Host
from hosts.job import Launch, Wanted, agent

# Short, so that a test is. A busy machine is slow and takes its steps all the same.
SETTINGS = {"NEMO_PATCHES_TIMEOUT": "4", "NEMO_PATCHES_STALL_TIMEOUT": "6"}
START_S = 400
SAYS_S = 120  # from a fault until all has been said; a host without power takes 30
FIRST_STEPS = 5
_PORT = 29400  # of the first host alone, and free there
_MISSING = re.compile(r"(?:Missing|gone): ranks? ([\d, -]+?)(?: and (\d+))? of \d+")
# Its length has not come either, and this is why: no reason to blame it.
_WAITS_ITSELF = re.compile(r"\| rank (\d+) (?:\([^)]*\) )?waits itself")


@dataclass(frozen=True)
class Report:
    """A stall report of a rank's. missing: by rank, the kind."""

    missing: Mapping[int, str]
    text: str


class Job:
    """Runs until the hosts are gone."""

    def __init__(
        self,
        hosts: list[Host],
        shared: Path,
        want: Wanted = Wanted(),  # noqa: B008  # frozen
        restarts: int = 0,
        nodes: str = "",
        endpoint: str = "",
        **environment: str,
    ) -> None:
        self.hosts = hosts
        self.shared = shared
        self.want = want
        self.size = len(hosts) * want.per_host
        self._reports: dict[int, dict[float, Report]] = {}
        self._environment = {
            "JOB": want.as_json(),
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
            # stock, too: the ranks of a second attempt do not find each other without it
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **SETTINGS,
            **environment,
        }
        self._launch = Launch(
            nodes or str(len(hosts)),
            want.per_host,
            endpoint or f"{hosts[0].address}:{_PORT}",
            restarts,
        )
        self.agents: list[BaseProcess] = []

    def start(self, number: int) -> None:
        """torchrun on the host of this number."""
        log = self.shared / f"agent.{number}.log"
        arguments = (self.hosts[number], self._launch, self._environment, log)
        process = ranks.rank_process(agent, (*arguments, number == 0))
        process.start()
        self.agents.append(process)

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.want.per_host]

    def log(self, rank: int) -> str:
        file = self.shared / f"rank.{rank}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def lines(self, rank: int, words: str = "") -> list[str]:
        """nemo_patches' own that match, as a regular expression."""
        own = [line for line in self.log(rank).splitlines() if "nemo_patches " in line]
        return [line for line in own if re.search(words, line)]

    def warnings(self, rank: int, words: str = "") -> list[str]:
        return self.lines(rank, f" (?:WARNING|ERROR) .*{words}")

    def losses(self, rank: int) -> list[str]:
        return re.findall(r"^step \d+ loss (\S+)", self.log(rank), re.MULTILINE)

    def starts(self, rank: int) -> int:
        """How often it has started: torchrun's own count differs between hosts."""
        return len(re.findall(rf"^rank {rank} .* starts, pid", self.log(rank), re.M))

    def pid(self, rank: int) -> int:
        """On its host, of its latest attempt."""
        return int(
            re.findall(rf"^rank {rank} .* starts, pid (\d+)", self.log(rank), re.M)[-1]
        )

    def signal(self, rank: int, name: str) -> None:
        done = self.host_of(rank).run("kill", f"-{name}", str(self.pid(rank)))
        assert done.returncode == 0, done.stderr

    def reports(self, rank: int) -> list[Report]:
        """All that were seen of this rank's: a report replaces the one before."""
        return list(self._reports.get(rank, {}).values())

    def accused(self, rank: int) -> set[int]:
        """All that this rank has called missing or gone."""
        found = {one for report in self.reports(rank) for one in report.missing}
        for line in self.warnings(rank):
            for first, last in _MISSING.findall(line):
                waiting = set(map(int, _WAITS_ITSELF.findall(line)))
                found |= (_numbers(first) | _numbers(last)) - waiting
        return found

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Fails with what all ranks have written, unless it comes true in time, and before all has
        ended.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            is_over = self.agents and not any(one.is_alive() for one in self.agents)
            if is_over or time.monotonic() > deadline:
                assert condition(), f"not {what}\n{self.told()}"
                return
            self._read_reports()
            time.sleep(0.1)
        self._read_reports()

    def until_it_trains(
        self, steps: int = FIRST_STEPS, ranks: Iterable[int] | None = None
    ) -> None:
        every = list(ranks) if ranks is not None else range(self.size)
        self.until(
            lambda: all(len(self.losses(rank)) >= steps for rank in every),
            START_S,
            f"{steps} steps",
        )

    def until_told(self, rank: int, words: str, seconds: float = SAYS_S) -> None:
        self.until(
            lambda: self.lines(rank, words), seconds, f"told by rank {rank}: {words}"
        )

    def codes(self, seconds: float) -> list[int | None]:
        """Of all agents, which end."""
        self.until(
            lambda: not any(agent.is_alive() for agent in self.agents), seconds, "ended"
        )
        return [agent.exitcode for agent in self.agents]

    def told(self) -> str:
        """For a test that fails."""
        logs = sorted(self.shared.glob("*.log"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs
        )

    def _read_reports(self) -> None:
        for host in self.hosts:
            folders = Path(f"/proc/{host.pid}/root/tmp")
            for file in folders.glob("nemo_patches-*/*/stall_rank_*.json"):
                with contextlib.suppress(OSError):  # the host has lost power meanwhile
                    self._keep(json.loads(file.read_bytes()))

    def _keep(self, content: dict[str, Any]) -> None:
        missing = {one["rank"]: one["kind"] for one in content["missing"]}
        report = Report(missing, content["text"])
        self._reports.setdefault(content["rank"], {})[content["time"]] = report

    def end(self) -> None:
        """The hosts end the ranks; the agents outside are reaped here."""
        for process in self.agents:
            process.kill()
            process.join(30)


@contextlib.contextmanager
def started(job: Job) -> Iterator[Job]:
    try:
        for number in range(len(job.hosts)):
            job.start(number)
        yield job
    finally:
        job.end()


def _numbers(text: str) -> set[int]:
    """ "0, 2-4" """
    found: set[int] = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
