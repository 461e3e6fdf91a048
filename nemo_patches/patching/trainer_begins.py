"""What a callback of ours does as a Lightning trainer begins."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

# What launchers tell a process of its place: it is the job's first where none is above 0.
_PLACES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
# Of Lightning, which says on each rank that it adds callbacks.
_LOGGERS = (
    "lightning.fabric.utilities.registry",
    "lightning_fabric.utilities.registry",
)
_OF_A_SHELL = ("bash", "interactive")  # jobs with these names Lightning takes for one


class TrainerBegins:
    """In a process that stays alone it imports nothing of ours."""

    def __init__(self, begin_reports: Callable[[], None] | None = None) -> None:
        """begin_reports: where the launcher has said nothing of several ranks."""
        self._begin_reports = begin_reports
        if any(os.environ.get(name, "").strip("0") for name in _PLACES):
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_is_not_of_ours)
        _say_who_is_rank_0()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The process group is there now, and no data loader has forked a worker yet."""
        if self._begin_reports is not None and trainer.world_size > 1:
            self._begin_reports()
        subscriber = sys.modules.get("nemo_patches.watch.subscriber")
        if subscriber is not None:
            subscriber.trains_with(trainer)


def _is_not_of_ours(record: logging.LogRecord) -> bool:
    """Rank 0 says it for all."""
    return "from entry point 'nemo_patches'" not in str(record.msg)


@functools.cache
def _say_who_is_rank_0() -> None:
    """Once a job, by Slurm's second task: where it has been given no rank, each is rank 0."""
    given = os.environ
    name = given.get("SLURM_JOB_NAME", "")
    if name not in _OF_A_SHELL or given.get("SLURM_PROCID") != "1":
        return
    if any(given.get(one) for one in _PLACES[:-1]):
        return
    from nemo_patches.sync.rank_log import report

    report(
        logging.WARNING,
        f"Slurm's job has the name {name!r}, so Lightning takes it for a shell: each of its"
        f" {given.get('SLURM_NTASKS', 'several')} tasks is rank 0 of a job of its own, unless"
        f" the trainer was given a SLURMEnvironment(). Start it as `salloc -J train ..`, or"
        f" with `SLURM_JOB_NAME=train` set",
    )
