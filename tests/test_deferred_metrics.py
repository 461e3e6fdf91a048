"""Deferred metrics on real NeMo models and ranks: stock's values to the last bit where the batches
are even, and all batches counted where they are not."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import asr_models
import pytest
import torch
from asr_models import Stream, loader
from ranks import Result, run_ranks

import nemo_patches
from nemo_patches.patching import COLLECTION, TARGET_MODULES, monkeypatch

pytestmark = [pytest.mark.alone, pytest.mark.matrix, pytest.mark.one_nemo]
MODELS = {
    "ctc": asr_models.ctc,
    "ctc and BLEU": asr_models.ctc_with_bleu,
    "rnnt": asr_models.rnnt,
    "rnnt, fused": lambda trainer: asr_models.rnnt(trainer, fused=True),
    "hybrid": lambda trainer: asr_models.rnnt(trainer, hybrid=True),
    "hybrid, fused": lambda trainer: asr_models.rnnt(trainer, fused=True, hybrid=True),
    "attention": asr_models.aed,
}


def own_end(trainer: Any) -> Any:
    """A model that does not come to NeMo's end of an evaluation."""
    model = asr_models.ctc(trainer)
    ended = {
        "on_validation_epoch_end": lambda self: self.validation_step_outputs.clear()
    }
    model.__class__ = type("OwnEnd", (type(model),), ended)
    return model


def own_start(trainer: Any) -> Any:
    model = asr_models.ctc(trainer)
    model.__class__ = type(
        "OwnStart", (type(model),), {"on_validation_epoch_start": lambda self: None}
    )
    return model


def partial_start(trainer: Any) -> Any:
    """Its epoch start has no code that could be looked at."""
    model = asr_models.ctc(trainer)
    start = functools.partialmethod(type(model).on_validation_epoch_start)
    model.__class__ = type(
        "PartialStart", (type(model),), {"on_validation_epoch_start": start}
    )
    return model


def partial_end(trainer: Any) -> Any:
    model = asr_models.ctc(trainer)
    end = functools.partialmethod(type(model).on_validation_epoch_end)
    model.__class__ = type(
        "PartialEnd", (type(model),), {"on_validation_epoch_end": end}
    )
    return model


def own_outputs(trainer: Any) -> Any:
    """What it adds to its outputs is not in each, nor of one shape, nor the same on every rank."""
    model = asr_models.ctc(trainer)
    stock = type(model)

    def validation_step(
        self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        given = stock.validation_step(self, batch, batch_idx, dataloader_idx)
        more = {
            f"wer_num_of_{torch.distributed.get_rank()}": torch.ones(1),
            "each": torch.ones(2 + batch_idx),
        }
        self.validation_step_outputs[-1].update(
            more if batch_idx else {**more, "first": torch.ones(())}
        )
        return given

    model.__class__ = type("OwnOutputs", (stock,), {"validation_step": validation_step})
    return model


def no_dicts(trainer: Any) -> Any:
    """With several loaders NeMo asks for none."""
    model = asr_models.ctc(trainer)
    stock = type(model)

    def validation_step(
        self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        given = stock.validation_step(self, batch, batch_idx, dataloader_idx)
        self.validation_step_outputs[dataloader_idx][-1] = torch.ones(())
        return given

    def multi_validation_epoch_end(
        self: Any, outputs: Any, dataloader_idx: int = 0
    ) -> Any:
        return {"log": {"val_wer": torch.stack(outputs).mean()}}

    own = {
        "validation_step": validation_step,
        "multi_validation_epoch_end": multi_validation_epoch_end,
    }
    model.__class__ = type("NoDicts", (stock,), own)
    return model


# The others' sums are among those of these.
UNEVEN = ("ctc and BLEU", "rnnt, fused", "hybrid", "attention")
OWN = {
    "own end": own_end,
    "own start": own_start,
    "partial end": partial_end,
    "partial start": partial_start,
    "own outputs": own_outputs,
    "no dicts": no_dicts,
}


def evaluated(
    name: str, loaders: Any, stage: str = "validate", callbacks: Any = ()
) -> dict[str, str]:
    """What NeMo has logged of the metrics, to the last bit."""
    trainer = asr_models.trainer_of(callbacks)
    model = {**MODELS, **OWN}[name](trainer)
    asr_models.name_loaders(model, loaders)
    getattr(trainer, stage)(model, loaders, verbose=False)
    return {
        key: float(value).hex()
        for key, value in trainer.callback_metrics.items()
        if "wer" in key or "bleu" in key
    }


def batches(first: int, last: int, size: int = 2) -> Any:
    return loader(Stream(range(first, last), size))


def trained(loaders: Any) -> dict[str, str]:
    """What a fit() logs of a validation, where DDP broadcasts buffers."""
    trainer = asr_models.trainer_of(num_sanity_val_steps=0, max_epochs=2)
    model = asr_models.ctc(trainer)
    trainer.fit(model, batches(40, 42), loaders)
    return {
        key: float(value).hex()
        for key, value in trainer.callback_metrics.items()
        if "val_wer" in key
    }


def failed(loaders: Any) -> list[bool]:
    """Whether the metrics wait for all ranks in a training after an exception has ended a
    validation.
    """
    import lightning.pytorch as pl

    seen: list[bool] = []

    class Fails(pl.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(module.wer._to_sync)
            raise RuntimeError("disk full")

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(module.wer._to_sync)

    trainer = asr_models.trainer_of([Fails()], limit_train_batches=1)
    model = asr_models.ctc(trainer)
    with contextlib.suppress(RuntimeError):
        trainer.validate(model, loaders)
    trainer.fit(model, loaders)
    return seen


def reverted(loaders: Any) -> None:
    """In the middle of a validation."""
    import lightning.pytorch as pl

    class Reverts(pl.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, *_: Any) -> None:
            nemo_patches.revert()

    evaluated("ctc", loaders, callbacks=[Reverts()])


def scenarios(rank: int, size: int) -> dict[str, Any]:
    asr_models.prepare()
    seen: dict[str, Any] = {}
    half = batches(5 * rank, 5 * rank + 5)
    both = [half, batches(20 + 2 * rank, 22 + 2 * rank)]
    for metrics in ("stock", "deferred"):
        nemo_patches.apply(timeout=60, metrics=metrics)
        for name in MODELS:
            seen[f"{metrics}, {name}"] = evaluated(name, half)
        seen[f"{metrics}, two sets"] = evaluated("hybrid, fused", both)
        seen[f"{metrics}, test"] = evaluated("hybrid", both, "test")
    for name in OWN:
        seen[name] = evaluated(name, both if name == "no dicts" else half)
    # Nobody waits for the length of a rank that has no more.
    nemo_patches.apply(sync="local", metrics="deferred")
    # The same ten batches, six and four of them, and all and none.
    for name in UNEVEN:
        seen[f"uneven, {name}"] = evaluated(
            name, batches(0, 6) if rank == 0 else batches(6, 10)
        )
    seen["none"] = evaluated("hybrid, fused", batches(0, 10 * (1 - rank)))
    seen["none of one"] = evaluated("hybrid, fused", [half, batches(20, 20 + 4 * rank)])
    seen["trained"], seen["trained, none"] = (
        trained(half),
        trained(batches(0, 10 * rank)),
    )
    # Four and two to a batch: the joint has two sub-batches on rank 0, and one on rank 1.
    seen["sub-batches"] = evaluated("rnnt, fused", batches(0, 3, 4 - 2 * rank))
    seen["failed"] = failed(half)
    reverted(half)
    seen["reverted, ctc"] = evaluated("ctc", half)
    return seen


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return run_ranks(scenarios, 2, limit=600)


@pytest.fixture(scope="module")
def seen(results: list[Result]) -> dict[str, Any]:
    """What both ranks have seen: NeMo has Lightning reduce what it logs."""
    assert results[0].value == results[1].value
    return dict(results[0].value)


@pytest.mark.parametrize("name", [*MODELS, "two sets", "test"])
def test_even_values_are_stocks_to_the_last_bit(
    name: str, seen: dict[str, Any]
) -> None:
    assert seen[f"deferred, {name}"] == seen[f"stock, {name}"]
    rates = [float.fromhex(value) for value in seen[f"stock, {name}"].values()]
    # So that equality says something.
    assert any(rate not in (0.0, 1.0) for rate in rates), rates


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_batches_are_all_counted(name: str, seen: dict[str, Any]) -> None:
    assert seen[f"uneven, {name}"] == seen[f"stock, {name}"]  # of the same ten batches


def test_a_rank_without_any_batch_takes_part(seen: dict[str, Any]) -> None:
    assert seen["none"] == seen["stock, hybrid, fused"]
    assert seen["trained, none"] == seen["trained"]
    assert seen["none of one"].keys() == seen["stock, two sets"].keys()


def test_a_rank_with_more_sub_batches_takes_part(
    seen: dict[str, Any], results: list[Result]
) -> None:
    assert float.fromhex(seen["sub-batches"]["val_wer"]) > 0
    assert seen["reverted, ctc"] == seen["stock, ctc"]


def test_what_an_exception_or_revert_has_ended_is_as_stock_and_said(
    seen: dict[str, Any], results: list[Result]
) -> None:
    assert seen["failed"] == [False, True]
    for result in results:
        (line,) = result.lines("WARNING", "reverted before the end of an evaluation")
        assert "whose WER and BLEU are not of all ranks' batches" in line


def test_a_model_that_does_not_come_to_nemos_epoch_ends_is_as_stock_and_said(
    seen: dict[str, Any], results: list[Result]
) -> None:
    assert seen["own start"] == seen["own outputs"] == seen["stock, ctc"]
    assert set(seen["no dicts"].values()) == {(1.0).hex()}
    for result in results:
        end, start, partial_end, no_dicts = result.lines("ERROR")
        assert (
            "NoDicts: no sums of WER or BLEU in its outputs; what it logs is each rank's own"
            in no_dicts
        )
        assert (
            "OwnEnd: left as stock: its own on_validation_epoch_end does not call NeMo's"
            in end
        )
        assert (
            "OwnStart: left as stock: its own on_validation_epoch_start does not call NeMo's"
            in start
        )
        # The start of a partial does call NeMo's, which is seen when it is called; of an end that
        # would be too late.
        assert (
            "PartialEnd: left as stock: its own on_validation_epoch_end does not call NeMo's"
            in partial_end
        )


WER = "nemo.collections.asr.metrics.wer"


def drifted(rank: int, size: int) -> list[str]:
    from nemo.collections.asr.models.asr_model import ASRModel

    def on_test_epoch_start(self: Any, more: int) -> None:
        raise AssertionError

    nemo_patches.revert()
    ASRModel.on_test_epoch_start = on_test_epoch_start
    texts = [refused(), str(nemo_patches.status())]
    nemo_patches.apply()
    texts += [refused(), str(nemo_patches.status())]
    wer, sys.modules[WER] = sys.modules[WER], None  # type: ignore[assignment]  # as if this NeMo had it not
    texts.append(refused())
    sys.modules[WER] = wer
    os.environ["NEMO_PATCHES_METRICS"] = "deferred"
    nemo_patches.revert()
    # As in a process that begins under auto-apply.
    monkeypatch.this_process = monkeypatch.Patching()
    for module in (*TARGET_MODULES, COLLECTION):
        if module in sys.modules:
            monkeypatch.this_process.on_import(module)
    return [*texts, str(nemo_patches.status())]


def refused() -> str:
    try:
        nemo_patches.apply(metrics="deferred")
    except nemo_patches.DriftError as error:
        return str(error)
    return "nothing was raised"


def test_nemo_code_that_is_not_as_expected_is_refused_and_left_as_stock() -> None:
    (result,) = run_ranks(drifted, 1, group=False)
    first, nothing, second, patched, missing, auto = result.value
    assert f"WER.compute: import of {WER} halted" in missing
    (skipped,) = (
        line
        for line in auto.splitlines()
        if line.startswith("skipped: ASRModel.on_test_epoch_start: ")
    )
    assert "drifted.<locals>.on_test_epoch_start" in skipped
    assert "ASRModel.on_test_epoch_start: expected a plain function" in skipped
    for text in (first, second):
        assert (
            "ASRModel.on_test_epoch_start: expected a plain function (self), found (self, more)"
            in text
        )
    assert "patched: nothing" in nothing
    for text in (patched, auto):
        assert "patched: ConformerEncoder" in text
        assert "metrics=deferred" not in text
    assert (
        len(
            result.lines(
                "ERROR", "metrics are not deferred: ASRModel.on_test_epoch_start"
            )
        )
        == 1
    )


def one_that_hangs(rank: int, size: int, name: str, most: int, batch: int) -> None:
    asr_models.prepare()
    nemo_patches.apply(sync="local")  # else it would hang before
    evaluated(
        name,
        batches(0, 4 + most * (1 - rank), 2 + batch * (1 - rank)),
        callbacks=[asr_models.hang_watch()],
    )
    print("the evaluation has ended", file=sys.stderr, flush=True)
    torch.distributed.barrier()


def test_stocks_metrics_hang_or_die_where_batches_or_sub_batches_are_uneven() -> None:
    with ThreadPoolExecutor() as pool:
        uneven = (("ctc", 2, 0), ("rnnt, fused", 0, 2))
        for run in [
            pool.submit(run_ranks, one_that_hangs, 2, *how, dies=(0, 1))
            for how in uneven
        ]:
            assert any(
                "the evaluation has ended" not in result.stderr
                for result in run.result()
            )
