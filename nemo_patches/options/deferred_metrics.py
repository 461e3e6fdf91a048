"""WER and BLEU without a collective per evaluation batch: their sums are added up at the end.

NeMo computes both from sums (errors and words; n-grams), which torchmetrics reduces over all ranks
in every batch. The order in which whole numbers are added up changes none of them.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nemo_patches.sync.places import layers
from nemo_patches.sync.rank_log import is_distributed, report

# What NeMo's epoch ends add up: val_wer_num, test_wer_denom_ctc, val_inter_wer_num_l4,
# val_bleu_pred_len, ...
_SUM = re.compile(r"(wer|bleu)_(num|denom|pred_len|target_len)(_|$)")
_SUM_METRICS = {
    ("nemo.collections.asr.metrics.wer", "WER"),
    ("nemo.collections.asr.metrics.bleu", "BLEU"),
}
_PATCHED_MODULES = (
    "nemo.collections.asr.models.asr_model",
    "nemo.core.classes.modelPT",
)
_Output = dict[str, Any]  # of one batch, by name
_Hook = Callable[[Any], Any]  # a method of a model without more parameters


class DeferredMetrics:
    """Of this process. Its wrappers are put around the beginning and the end of NeMo's evaluation
    epochs.

    A model whose own methods do not call NeMo's at both has metrics as stock, which is said. Where
    an exception has ended an evaluation, the next epoch of either kind finds the metrics as
    stock's.
    """

    def __init__(self) -> None:
        # Metrics, by model.
        self._deferred: weakref.WeakKeyDictionary[Any, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._said: set[str] = set()

    def beginning(
        self, original: _Hook, stage: str, in_force: Callable[[], bool]
    ) -> _Hook:
        """stage: "validation" or "test"."""

        @functools.wraps(original)
        def on_epoch_start(model: Any) -> Any:
            self._undo(model)
            if in_force() and _is_shared():
                self._begin(model, f"on_{stage}_epoch_end")
            return original(model)

        return on_epoch_start

    def end(self, original: _Hook, stage: str, in_force: Callable[[], bool]) -> _Hook:
        @functools.wraps(original)
        def on_epoch_end(model: Any) -> Any:
            if (
                in_force()
                and _is_shared()
                and model not in self._deferred
                and _sums(model)
            ):
                self._say_as_stock(model, f"on_{stage}_epoch_start")
            if self._undo(model):
                _broadcast_as_others(model)
                outputs = getattr(model, f"{stage}_step_outputs")
                several = bool(outputs) and isinstance(outputs[0], list)
                self._add_up(outputs if several else [outputs], model)
            return original(model)

        return on_epoch_end

    def training(self, original: _Hook) -> _Hook:
        @functools.wraps(original)
        def on_train_epoch_start(model: Any) -> Any:
            self._undo(model)
            return original(model)

        return on_train_epoch_start

    def stop(self) -> None:
        """Restore stock's behaviour of every metric."""
        for model in list(self._deferred):
            if self._undo(model):
                name = f"deferred metrics: {type(model).__name__}"
                text = "reverted before the end of an evaluation"
                then = "whose WER and BLEU are not of all ranks' batches"
                report(logging.WARNING, f"{name}: {text}, {then}")

    def _begin(self, model: Any, end: str) -> None:
        """end: the method that adds the sums up."""
        sums = _sums(model)
        metrics = _waiting_metrics(model)
        if sums and not _calls_nemos(model, end):
            sums = []
            self._say_as_stock(model, end)
        self._deferred[model] = sums
        for metric in sums:
            metric._to_sync = False
        others = sorted(
            {type(metric).__name__ for metric in metrics if not _is_sum(metric)}
        )
        if others:
            text = "left as stock, they are not known to be sums"
            self._say_once(f"{type(model).__name__}: {text}: {', '.join(others)}")

    def _undo(self, model: Any) -> bool:
        """Whether the model's metrics were deferred."""
        metrics = self._deferred.pop(model, [])
        for metric in metrics:
            metric._to_sync = True
        return bool(metrics)

    def _add_up(self, loaders: list[list[_Output]], model: Any) -> None:
        """In the outputs of each loader's batches, replace this rank's sums by those of all ranks.

        A rank without a batch has those of the others, so that it comes to all that NeMo and
        Lightning do then.
        """
        summed = [_Summary(outputs) for outputs in loaders]
        everyone: list[list[_Summary]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, summed)
        for number, outputs in enumerate(loaders):
            summaries = [rank[number] for rank in everyone if rank[number].batches]
            if not summaries:
                continue
            of_ranks = _alike([summary.sums for summary in summaries])
            sums = {name: _add(values) for name, values in of_ranks}
            if not sums:
                text = "no sums of WER or BLEU in its outputs; what it logs is each rank's own"
                self._say_once(f"{type(model).__name__}: {text}", is_wrong=True)
            of_ranks = _alike([summary.means for summary in summaries])
            means = {name: _add(values) for name, values in of_ranks}
            if not outputs and (sums or means):
                ranks = len(summaries)
                of_all = {
                    name: (mean / ranks).to(model.device)
                    for name, mean in means.items()
                }
                outputs.append(of_all)
            for name, total in sums.items():
                for output in outputs:
                    output[name] = torch.zeros_like(total, device=model.device)
                outputs[0][name] = total.to(model.device)

    def _say_as_stock(self, model: Any, method: str) -> None:
        text = f"its own {method} does not call NeMo's"
        then = "WER and BLEU wait for all ranks in every batch"
        self._say_once(
            f"{type(model).__name__}: left as stock: {text}; {then}", is_wrong=True
        )

    def _say_once(self, text: str, is_wrong: bool = False) -> None:
        if text not in self._said:
            self._said.add(text)
            report(
                logging.ERROR if is_wrong else logging.INFO, f"deferred metrics: {text}"
            )


class _Summary:
    """Of one loader's batches on one rank: what is added up, and the means of what is not, such as
    the loss.
    """

    def __init__(self, outputs: list[_Output]) -> None:
        self.batches = len(outputs)
        self.sums = dict[str, torch.Tensor]()
        self.means = dict[str, torch.Tensor]()
        for name, values in _alike(outputs):
            if _SUM.search(name):
                self.sums[name] = _add(values)
            elif values[0].is_floating_point():
                self.means[name] = _add(values) / len(outputs)


def _alike(parts: Sequence[_Output]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The values of every part under a name, if tensors of one shape: a user's model may add
    others.
    """
    for name in (
        parts[0] if parts and all(isinstance(part, dict) for part in parts) else ()
    ):
        values = [part.get(name) for part in parts]
        tensors = [
            value.detach().cpu() for value in values if isinstance(value, torch.Tensor)
        ]
        if (
            len(tensors) == len(parts)
            and len({tensor.shape for tensor in tensors}) == 1
        ):
            yield name, tensors


def _add(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the values' own type, through one that has every whole number up to 2**53."""
    return (
        torch.stack([tensor.double() for tensor in tensors]).sum(0).to(tensors[0].dtype)
    )


def _broadcast_as_others(model: Any) -> None:
    """On a rank without a batch: in a fit() the others' first one has begun with DDP's broadcast of
    buffers, and their next training batch does not, since it comes after a forward without
    gradients.
    """
    # No trainer: the user's own loop.
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    ddp = getattr(strategy, "model", None)
    if isinstance(ddp, DistributedDataParallel) and ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = False


def _is_shared() -> bool:
    return is_distributed() and dist.get_world_size() > 1


def _waiting_metrics(model: Any) -> list[Any]:
    """The metrics that wait for all ranks."""
    return [module for module in model.modules() if getattr(module, "_to_sync", False)]


def _sums(model: Any) -> list[Any]:
    return [metric for metric in _waiting_metrics(model) if _is_sum(metric)]


def _calls_nemos(model: Any, method: str) -> bool:
    """Whether the model's method comes to the one that is patched: each of its classes that has its
    own calls it.
    """
    for owner in type(model).__mro__:
        if owner.__module__ in _PATCHED_MODULES:
            return True
        own = vars(owner).get(method)
        if own is not None and method not in _names_in(own):
            return False
    return True


def _names_in(method: Any) -> Sequence[str]:
    """The names that a method uses; none where it is no plain function, but a partial or so."""
    code = getattr(layers(method)[-1], "__code__", None) if callable(method) else None
    return code.co_names if code else ()


def _is_sum(metric: Any) -> bool:
    """Whether it is one whose numbers NeMo adds up, and each of its states is reduced by adding."""
    known = any(
        (base.__module__, base.__name__) in _SUM_METRICS
        for base in type(metric).__mro__
    )
    if not known:
        return False
    reductions = {
        getattr(function, "__name__", "") for function in metric._reductions.values()
    }
    return reductions == {"dim_zero_sum"}


deferred_metrics = DeferredMetrics()  # of this process


def replacement(
    method: str, original: Any, in_force: Callable[[], bool]
) -> Callable[..., None]:
    """What stands in for a method of NeMo's that begins or ends an evaluation, or training after
    an exception: on_validation_epoch_start and others of such names.
    """
    _, stage, _, begins_or_ends = method.split("_")
    if stage == "train":
        return deferred_metrics.training(original)
    if begins_or_ends == "start":
        return deferred_metrics.beginning(original, stage, in_force)
    return deferred_metrics.end(original, stage, in_force)
