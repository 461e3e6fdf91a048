"""The first line of a trace: its rank, where it runs, with which versions and settings."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping

import torch

from nemo_patches.patching.settings import TraceSettings
from nemo_patches.sync import __version__
from nemo_patches.sync.rank_log import launchers_number, rank_and_size
from nemo_patches.sync.settings import Settings
from nemo_patches.tracing import records
from nemo_patches.tracing.records import Header
from nemo_patches.watch import subscriber

_LONGEST_JOB = 200  # characters


def make_header(trace: TraceSettings, settings: Settings, started: float) -> Header:
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
        settings={
            setting.name: setting.text(value)
            for setting, value in (*settings.items(), *subscriber.settings_in_force().items())
            if setting.is_alike
        }
        | _other_settings(),
        checks=list(trace.checks),
        job=_job(os.environ),
    )


def _other_settings() -> dict[str, str]:
    """Of the upper layers, what is not the default: ranks that differ in these wait for each other."""
    return dict(one.split("=", 1) for one in subscriber.other_settings().split(", ") if "=" in one)


def _job(environment: Mapping[str, str]) -> str:
    """By the launcher: torchrun's run id unless it is the default one, SLURM's job, or where the ranks meet."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return run[:_LONGEST_JOB]
    if slurm := environment.get("SLURM_JOB_ID", ""):
        return f"slurm {slurm}.{environment.get('SLURM_STEP_ID', '')}"[:_LONGEST_JOB]
    where = (environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", ""))
    return ":".join(where)[:_LONGEST_JOB] if all(where) else ""


def _versions() -> dict[str, str]:
    found = {"nemo_patches": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("nemo", "lightning"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found
