"""The first line of a trace: its rank, where it runs, with which versions and settings."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence

import torch

from nemo_patches.sync import __version__
from nemo_patches.sync.rank_log import launchers_number, rank_and_size
from nemo_patches.sync.settings import TRACING, Settings
from nemo_patches.tracing import records
from nemo_patches.tracing.records import Header

_LONGEST_JOB = 200  # characters


def make_header(settings: Settings, checks: Sequence[str], started: float) -> Header:
    rank, size = rank_and_size()
    return Header(
        format=records.FORMAT,
        rank=rank,
        world_size=size,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started,
        restart=launchers_number("TORCHELASTIC_RESTART_COUNT") or 0,
        versions=_versions(),
        settings=_alike(settings),
        checks=list(checks),
        job=_job(os.environ),
    )


def _alike(settings: Settings) -> dict[str, str]:
    """What all ranks should have alike; of what has a package of its own, what is not the
    default.
    """
    return {
        setting.name: setting.text(value)
        for setting, value in settings.items()
        if not setting.package
        or (setting.package != TRACING and value != setting.default)
    }


def _job(environment: Mapping[str, str]) -> str:
    """By the launcher: torchrun's run id unless it is the default one, SLURM's job, or where the
    ranks meet.
    """
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return run[:_LONGEST_JOB]
    if slurm := environment.get("SLURM_JOB_ID", ""):
        attempt = environment.get("SLURM_RESTART_COUNT", "0")
        again = f" restart {attempt}" if attempt != "0" else ""  # with the same step id
        step = environment.get("SLURM_STEP_ID", "")
        return f"slurm {slurm}.{step}{again}"[:_LONGEST_JOB]
    where = (environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", ""))
    return ":".join(where)[:_LONGEST_JOB] if all(where) else ""


def _versions() -> dict[str, str]:
    found = {
        "nemo_patches": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in ("nemo", "lightning"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found
