"""What deferred metrics save of a validation epoch, and what StopTogether adds to a training step;
prints markdown.

Two ranks on Gloo, small real NeMo models under Lightning; runs of each kind alternate. It takes
about two minutes.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the ranks share few cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import asr_models
from ranks import run_ranks

import nemo_patches

EPOCHS, BATCHES = 9, 40
METRICS = ("stock", "deferred")
EVALUATED = {
    "CTC": asr_models.ctc,
    "RNNT": asr_models.rnnt,
    "hybrid": lambda trainer: asr_models.rnnt(trainer, hybrid=True),
}


def main() -> None:
    print(
        f"2 ranks on Gloo, {os.cpu_count()} cores; ms a batch: medians of {EPOCHS}"
        " epochs (quartiles)\n"
    )
    taken = run_ranks(measured, 2, limit=900)[0].value
    print(
        "| model | metrics | validation | of it, in compute() | share"
        " |\n|---|---|---|---|---|"
    )
    for name in EVALUATED:
        for metrics in METRICS:
            of_batch, of_metrics = zip(*taken[name, metrics], strict=True)
            shares = [part / whole for whole, part in taken[name, metrics]]
            print(
                f"| {name} | {metrics} | {quartiles(of_batch)} |"
                f" {quartiles(of_metrics)} | {quartiles(shares)} |"
            )
    plain = [whole for whole, _ in taken["training", "plain"]]
    print("\n| training CTC | step | over plain |\n|---|---|---|")
    for kind in ("plain", "StopTogether", "plain again"):
        steps = [whole for whole, _ in taken["training", kind]]
        ratios = [step / before for step, before in zip(steps, plain, strict=True)]
        print(f"| {kind} | {quartiles(steps)} | {quartiles(ratios)} |")


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def measured(rank: int, size: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Milliseconds a batch, and of these in metrics' compute(), of each epoch."""
    from nemo_patches.lightning import StopTogether

    asr_models.prepare()
    logging.getLogger("nemo_patches").setLevel(logging.ERROR)
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(EPOCHS):
        for name, make in EVALUATED.items():
            for metrics in METRICS:
                nemo_patches.apply(metrics=metrics)
                taken.setdefault((name, metrics), []).append(
                    timed("validate", make, [])
                )
        for kind in ("plain", "StopTogether", "plain again"):
            callbacks = [StopTogether()] if kind == "StopTogether" else []
            taken.setdefault(("training", kind), []).append(
                timed("fit", asr_models.ctc, callbacks)
            )
    return taken


def timed(what: str, make: Any, callbacks: list[Any]) -> tuple[float, float]:
    import lightning.pytorch as pl

    class Clock(pl.Callback):  # type: ignore[misc]
        began = ended = computing = 0.0

        def on_validation_epoch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_validation_end(self, *_: Any) -> None:
            self.ended = time.perf_counter()

        on_train_epoch_start, on_train_epoch_end = (
            on_validation_epoch_start,
            on_validation_end,
        )

        def watch(self, metric: Any) -> None:
            compute = metric.compute

            def timed_compute() -> Any:
                began = time.perf_counter()
                try:
                    return compute()
                finally:
                    self.computing += time.perf_counter() - began

            metric.compute = timed_compute

    clock = Clock()
    trainer = asr_models.trainer_of([*callbacks, clock], num_sanity_val_steps=0)
    batches = asr_models.loader(asr_models.Stream(range(BATCHES)))
    model = make(trainer)
    for metric in model.modules():
        if hasattr(metric, "sync_on_compute"):
            clock.watch(metric)
    if what == "fit":
        trainer.fit(model, batches)
    else:
        trainer.validate(model, batches, verbose=False)
    return (
        clock.ended - clock.began
    ) * 1000 / BATCHES, clock.computing * 1000 / BATCHES


if __name__ == "__main__":
    main()
