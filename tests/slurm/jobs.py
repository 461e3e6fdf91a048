"""Batch jobs for the cluster: submit one, wait for what its log says or how Slurm says it is."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import cluster_page
from cluster import LOGIN, Cluster, until

CHECKOUT = Path(__file__).parents[2]
TRAINING = f"{sys.executable} {Path(__file__).with_name('training.py')}"
HANGS = f"{TRAINING} fault=sleep@1@20"
PYTHON = "python train.py"  # in the page's commands
COLLECT = cluster_page.command("Slurm", "look while it hangs")
ON = {
    "PYTHONPATH": str(CHECKOUT)
}  # what switches nemo_patches on in all that a job starts
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "HYDRA_FULL_ERROR": "1",
    "HF_HUB_OFFLINE": "1",
    "NEMO_PATCHES_STALL_TIMEOUT": "6",
    "NEMO_PATCHES_TIMEOUT": "3",
}


class Job:
    """A job in a folder of its own. lines: of its script. wait_s: of each of the waits."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        lines: str,
        options: str = "-N 2 --ntasks-per-node=1",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir(exist_ok=True)
        settings = {**_SETTINGS, **env}
        exports = [f"export {name}='{value}'" for name, value in settings.items()]
        script = folder / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", *exports, lines, ""]))
        done = cluster.on(
            LOGIN,
            f"cd {folder} && sbatch --parsable --open-mode=append {options} job.sh",
        )
        assert done.returncode == 0, done.stdout
        self.id = done.stdout.split()[-1]

    @property
    def log(self) -> Path:
        return self.folder / f"slurm-{self.id}.out"

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def said(self, pattern: str, times: int = 1, limit_s: float = 300.0) -> str:
        """Wait until its log has the pattern so often; the last line with it."""
        with contextlib.suppress(AssertionError):  # below it is said with the log
            until(
                lambda: (
                    len(re.findall(pattern, self.text())) >= times
                    or self.state() in ENDS
                ),
                limit_s,
                pattern,
            )
        lines = [line for line in self.text().splitlines() if re.search(pattern, line)]
        told = f"{self.text()[-3000:]}\n{self.info()}"
        assert len(lines) >= times, f"no {pattern!r}: {told}"
        return lines[-1]

    def info(self) -> str:
        return self.cluster.on(LOGIN, f"scontrol show job {self.id}").stdout

    def state(self) -> str:
        found = re.search(r"JobState=(\w+)", self.info())
        return found[1] if found else ""

    def ended(self, limit_s: float = 300.0) -> str:
        """Wait for its end; its state."""
        until(
            lambda: self.state() in ENDS,
            limit_s,
            f"the end of job {self.id}: {self.text()[-3000:]}",
        )
        # srun's last lines come after Slurm has told the end
        until(lambda: "COMPLETING" not in self.info(), 300.0, "the job is over")
        return self.state()

    def cancel(self) -> None:
        self.cluster.on(LOGIN, f"scancel {self.id}; scancel -s KILL {self.id}")
        until(lambda: self.state() in (*ENDS, ""), 300.0, f"job {self.id} has ended")

    def pid(self, rank: int) -> tuple[str, int]:
        """The host of a task, and its process there."""
        line = self.said(rf"task {rank}: starts on")
        found = re.search(r"starts on (\S+), pid (\d+)", line)
        assert found is not None
        return found[1], int(found[2])

    def signal(self, rank: int, name: str) -> None:
        host, pid = self.pid(rank)
        done = self.cluster.on(host, f"kill -{name} {pid}")
        assert done.returncode == 0, done.stdout


def collect(job: Job) -> str:
    """The page's command."""
    return cluster_page.with_words(COLLECT, NODES="2", J=job.id)


def diagnosed(cluster: Cluster, what: object, host: str = LOGIN) -> tuple[int, str]:
    done = cluster.on(host, f"nemo-patches diagnose {what}")
    return done.returncode, done.stdout
