"""A Lightning callback that logs what the length sync does on every rank: calls, fallbacks, share of waiting, lag."""

from __future__ import annotations

import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.stall.heartbeats import Beat
from nemo_patches.sync import length_sync
from nemo_patches.sync.rank_log import report

_RANKS = 64  # with more, every rank's own figures would be thousands of series


class LengthSyncCallback(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Every `log_every_n_steps` training batches, rank 0 logs to the trainer's loggers, under `length_sync/`:

    lag_s/rank_N: seconds by which the rank came to a round after the one that waits most, in the mean. A chronic
        straggler has most of it. lag_s/max and straggler: the largest, and whose it is.
    waiting_share/rank_N: of its time, what it spent waiting in length syncs. waiting_share/max: the largest.
    calls/rank_N, fallbacks/rank_N: encoder calls so far, and those that went on with the rank's own length.

    Lag and share are of the time since the last figures. With more than 64 ranks, the largest only. Where something is
    wrong it is in the progress bar: `length_sync_fallbacks` of all ranks since the last figures, and
    `length_sync_missing`, how many ranks rank 0 waits for. The figures are of the ranks' heartbeats (sent every second,
    less often with hundreds of ranks), asked for at one time and logged at the next: training waits for nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Beat] = {}
        self._before_at = self._asked_at = 0.0
        self._given_up = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._given_up or trainer.global_rank != 0:
            return
        try:
            missing = {one.rank for stall in length_sync.stalls() for one in stall.missing}
            if missing:
                _to_progress_bar(pl_module, "length_sync_missing", len(missing))
            # By batch, not by step: gradients may be accumulated.
            if (batch_idx + 1) % max(trainer.log_every_n_steps, 1) == 0:
                self._log(trainer, pl_module)
        except Exception as error:
            self._given_up = True  # some figures less must not end a training run
            report(logging.ERROR, f"LengthSyncCallback has ended by an error of its own, please report it: {error!r}")

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        beats, at, self._asked_at = length_sync.beats(), self._asked_at, time.monotonic()
        before, span = self._before, at - self._before_at
        if not beats or any(one.number <= before[rank].number for rank, one in beats.items() if rank in before):
            return  # not every rank has sent another since
        self._before, self._before_at = beats, at
        if before.keys() != beats.keys() or span <= 0:
            return
        metrics = _metrics(before, beats, span)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        fallbacks = sum(max(beats[rank].fallbacks - before[rank].fallbacks, 0) for rank in beats)
        if fallbacks:
            _to_progress_bar(pl_module, "length_sync_fallbacks", fallbacks)


def _metrics(before: dict[int, Beat], after: dict[int, Beat], span: float) -> dict[str, float]:
    """span: seconds between them."""
    # An encoder that was dropped meanwhile takes its share along: no less than 0.
    waited = {rank: max(after[rank].waited - before[rank].waited, 0.0) for rank in sorted(after)}
    rounds = {rank: max(after[rank].issued - before[rank].issued, 1) for rank in after}
    lag = {rank: (max(waited.values()) - one) / rounds[rank] for rank, one in waited.items()}
    straggler = max(lag, key=lambda rank: lag[rank])
    found = {"lag_s/max": lag[straggler], "straggler": straggler, "waiting_share/max": max(waited.values()) / span}
    if len(after) <= _RANKS:
        for rank, one in waited.items():
            found[f"lag_s/rank_{rank}"] = lag[rank]
            found[f"waiting_share/rank_{rank}"] = one / span
            found[f"calls/rank_{rank}"] = after[rank].calls
            found[f"fallbacks/rank_{rank}"] = after[rank].fallbacks
    return {f"length_sync/{name}": float(value) for name, value in found.items()}


def _to_progress_bar(pl_module: LightningModule, name: str, value: int) -> None:
    pl_module.log(name, float(value), prog_bar=True, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)
