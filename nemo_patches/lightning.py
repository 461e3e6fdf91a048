"""Lightning callbacks: LengthSyncCallback logs every rank's calls, fallbacks and lag; StopTogether ends passes."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

import nemo_patches
from nemo_patches.channel import keys
from nemo_patches.channel.store_client import StoreClient
from nemo_patches.options.stop_together import StopTogether as StopTogether
from nemo_patches.stall import subscriber
from nemo_patches.sync import length_sync
from nemo_patches.sync.rank_log import report

_MOST_RANKS = 64  # with more, every rank's own figures would be thousands of series
_EXCHANGE_LIMIT_S, _LOOK_S = 5.0, 0.2


class LengthSyncCallback(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Every `log_every_n_steps` training batches, rank 0 logs to the trainer's loggers, under `length_sync/`:

    lag_s/rank_N: mean seconds by which the rank came to a round later than the rank that waits most. A chronic
        straggler has the largest value. lag_s/max and straggler: the largest value, and its rank.
    waiting_share/rank_N: the share of its time that it waited in length syncs. waiting_share/max: the largest.
    calls/rank_N, fallbacks/rank_N: encoder calls so far, and those that used the rank's own length.

    Lag and share cover the time since the last figures. With more than 64 ranks, only the largest are logged. Problems
    are in the progress bar: `length_sync_fallbacks` of all ranks since the last figures, and `length_sync_missing`,
    the number of ranks that rank 0 waits for. Each rank writes its figures to the job's store, in a thread, and rank 0
    logs together what it has read since the last time: training waits for nothing.
    """

    def __init__(self) -> None:
        self._number = 0  # times that figures were due
        self._before: _Exchanged | None = None
        self._exchange: _Exchange | None = None
        self._given_up = self._said_unpatched = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        status = nemo_patches.status()
        if not status.patched and not self._said_unpatched:
            self._said_unpatched = True
            text = f"no NeMo encoder is patched in this process ({status.state}: {status.why})"
            report(logging.WARNING, f"LengthSyncCallback logs nothing: {text}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._given_up:
            return
        try:
            missing = {rank.rank for stall in subscriber.stalls() for rank in stall.missing}
            if missing and trainer.global_rank == 0:
                _to_progress_bar(pl_module, "length_sync_missing", len(missing))
            # By batch, not by step: gradients may be accumulated.
            if (batch_idx + 1) % max(trainer.log_every_n_steps, 1) == 0:
                self._log(trainer, pl_module)
                self._ask(trainer)
        except Exception as error:
            self._given_up = True  # missing figures must not end a training run
            report(logging.ERROR, f"LengthSyncCallback has ended by an error of its own, please report it: {error!r}")

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exchanged = self._exchange.exchanged if self._exchange is not None else None
        if exchanged is None or exchanged is self._before:
            return
        before, self._before = self._before, exchanged
        if before is None or before.figures.keys() != exchanged.figures.keys():
            return
        metrics = _metrics(before, exchanged)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        pairs = [(before.figures[rank], figures) for rank, figures in exchanged.figures.items()]
        fallbacks = sum(max(now.fallbacks - then.fallbacks, 0) for then, now in pairs)
        if fallbacks:
            _to_progress_bar(pl_module, "length_sync_fallbacks", fallbacks)

    def _ask(self, trainer: Trainer) -> None:
        self._number += 1
        monitor = subscriber.monitor()
        if monitor is None or (self._exchange is not None and self._exchange.thread.is_alive()):
            return  # no encoder call yet, or a store that owes an answer
        counters = length_sync.counters()
        figures = _Figures(
            number=self._number,
            calls=sum(encoder.calls for encoder in counters),
            rounds=sum(encoder.rounds for encoder in counters),
            fallbacks=sum(encoder.fallbacks for encoder in counters),
            waited_s=sum((encoder.waited for encoder in counters), timedelta(0)).total_seconds(),
        )
        self._exchange = _Exchange(monitor.client, trainer.global_rank, trainer.world_size, figures)


@dataclass(frozen=True)
class _Figures:
    """One rank's figures, of all its encoders. number: counts the times they were due, the same on all ranks."""

    number: int
    calls: int
    rounds: int
    fallbacks: int
    waited_s: float


@dataclass(frozen=True)
class _Exchanged:
    """All ranks' figures. at: time.monotonic() at which they were asked for."""

    figures: dict[int, _Figures]
    at: float


class _Exchange:
    """Writes this rank's figures for rank 0; on rank 0, reads all ranks' figures."""

    def __init__(self, client: StoreClient, rank: int, size: int, figures: _Figures) -> None:
        self.exchanged: _Exchanged | None = None  # written by the thread
        self._client, self._rank, self._size, self._figures = client, rank, size, figures
        self._began = time.monotonic()
        self.thread: threading.Thread = client.ask_in_thread(self._run)

    def _run(self) -> None:
        try:
            with self._client.asking() as store:
                store.set(keys.FIGURES.format(rank=self._rank), json.dumps(astuple(self._figures)))
            while self._rank == 0 and self.exchanged is None and time.monotonic() < self._began + _EXCHANGE_LIMIT_S:
                with self._client.asking() as store:
                    figures = self._read(store)
                if figures and all(of_rank.number >= self._figures.number for of_rank in figures.values()):
                    self.exchanged = _Exchanged(figures, self._began)
                else:
                    time.sleep(_LOOK_S)
        except (RuntimeError, ConnectionError):
            pass  # stall reports tell about a dead store
        except Exception as error:
            report(
                logging.ERROR,
                f"LengthSyncCallback: a rank's figures in the store cannot be read, and are not logged: {error!r}",
            )

    def _read(self, store: dist.Store) -> dict[int, _Figures]:
        """Empty until every rank has written its first figures."""
        wanted = [keys.FIGURES.format(rank=rank) for rank in range(self._size)]
        if not store.check(wanted):
            return {}
        figures = (_Figures(*json.loads(data)) for data in store.multi_get(wanted))
        return dict(enumerate(figures))


def _metrics(before: _Exchanged, after: _Exchanged) -> dict[str, float]:
    span_s = max(after.at - before.at, 1e-6)
    pairs = {rank: (before.figures[rank], figures) for rank, figures in after.figures.items()}
    # An encoder that was dropped meanwhile takes its share along: no less than 0.
    waited_s = {rank: max(now.waited_s - then.waited_s, 0.0) for rank, (then, now) in pairs.items()}
    rounds = {rank: max(now.rounds - then.rounds, 1) for rank, (then, now) in pairs.items()}
    lag_s = {rank: (max(waited_s.values()) - waited_s[rank]) / rounds[rank] for rank in pairs}
    straggler = max(lag_s, key=lambda rank: lag_s[rank])
    metrics = {
        "lag_s/max": lag_s[straggler],
        "straggler": straggler,
        "waiting_share/max": max(waited_s.values()) / span_s,
    }
    if len(pairs) <= _MOST_RANKS:
        for rank, (_, now) in pairs.items():
            metrics[f"lag_s/rank_{rank}"] = lag_s[rank]
            metrics[f"waiting_share/rank_{rank}"] = waited_s[rank] / span_s
            metrics[f"calls/rank_{rank}"] = now.calls
            metrics[f"fallbacks/rank_{rank}"] = now.fallbacks
    return {f"length_sync/{name}": float(value) for name, value in metrics.items()}


def _to_progress_bar(pl_module: LightningModule, name: str, value: int) -> None:
    pl_module.log(name, float(value), prog_bar=True, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)
