"""What settings switch on in addition to the encoders' sync: one table.

Of options/ and tracing/ nothing is imported but by setting, in the functions here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nemo_patches.patching.imported import drift
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import (
    CHECKPOINT_BASES,
    CHECKPOINT_TARGETS,
    METRIC_SUMS,
    METRIC_TARGETS,
    TARGETS,
    Target,
)
from nemo_patches.sync import length_sync
from nemo_patches.sync.rank_log import raised_by_signal_handler, rank_and_size, report
from nemo_patches.sync.settings import EVALUATION, STOCK, TRAINING, Settings

_InForce = Callable[[], bool]
_Method = Callable[..., Any]
_FORWARD = "forward"
# Of NeMo's checkpoint callback, its own and inherited ones; the functions in their place are
# options/checkpoints.py's.
_CHECKPOINT_METHODS = (
    "setup",
    "_monitor_candidates",
    "on_save_checkpoint",
    "on_train_end",
)
_AS_STOCK = "each rank decides about checkpoints, as in stock"


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """What one setting switches on.

    module: of ours, imported with it; empty: at its first use. targets: NeMo's methods that are
    replaced together, or not at all. others: what else must look as expected. begin: replaces
    them, unless they are. end: gives back, at a revert, what has begun. callback: for each of
    Lightning's trainers. refusal: what cannot be done where NeMo differs. left: what is then said
    under auto-apply, or where `module` cannot be imported; without, all of NeMo is left as stock.
    """

    setting: str
    module: str = ""
    targets: tuple[Target, ...] = ()
    others: tuple[Target, ...] = ()
    begin: Callable[[Replacements, _InForce], None] = _nothing
    end: Callable[[Replacements], None] = _nothing
    callback: Callable[[Settings], Any] = _nothing
    refusal: str = ""
    left: str = ""

    def is_on(self, settings: Settings) -> bool:
        value = getattr(settings, self.setting)
        return bool(value) and value != STOCK

    def load(self) -> None:
        """Import what is ours of it. Raises what that raises."""
        if self.module:
            importlib.import_module(self.module)

    def without(self, settings: Settings) -> Settings:
        as_stock: dict[str, Any] = {self.setting: STOCK}
        return replace(settings, **as_stock)

    def drift(self, replacements: Replacements) -> dict[Target, str]:
        """Why it cannot be patched, if it is not yet."""
        is_patched = any(map(replacements.holds, self.targets))
        return {} if is_patched else drift(self.targets + self.others)

    def why_not(self, replacements: Replacements, skipped: dict[Target, str]) -> str:
        """Why it cannot be switched on as NeMo is imported; empty where it can.

        skipped: is given the targets that differ.
        """
        try:
            self.load()
        except Exception as error:  # nothing of ours may break NeMo's import
            if raised_by_signal_handler(error):
                raise
            return repr(error)
        problems = self.drift(replacements)
        skipped |= problems
        return " | ".join(problems.values())


class FirstUse:
    """Has NeMo's checkpoint callback ask options/checkpoints.py, which is imported when several
    ranks first use it.
    """

    def __init__(self) -> None:
        self._cannot = False  # a rank that has missed the first question must ask none

    def wrapper(self, original: _Method, in_force: _InForce) -> _Method:
        @functools.wraps(original)
        def method(callback: Any, *args: Any, **more: Any) -> Any:
            ours = None
            if in_force() and rank_and_size()[1] > 1:
                ours = self._method(original.__name__)
            if ours is None:
                return original(callback, *args, **more)
            return ours(original, callback, *args, **more)

        return method

    def _method(self, name: str) -> _Method | None:
        if self._cannot:
            return None
        try:
            from nemo_patches.options import checkpoints
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            self._cannot = True
            text = "nemo_patches cannot import its part for them"
            report(logging.ERROR, f"{_AS_STOCK}: {text}: {error!r}")
            return None
        return checkpoints.METHODS[name]


def _agree_on_checkpoints(replacements: Replacements, in_force: _InForce) -> None:
    """Make NeMo's checkpoint callback take rank 0's decisions."""
    for owner in _owners(CHECKPOINT_TARGETS):
        if not replacements.has(owner):
            first_use = FirstUse()
            for name in _CHECKPOINT_METHODS:
                ours = first_use.wrapper(getattr(owner, name), in_force)
                replacements.put(owner, name, ours)


def _defer_metrics(replacements: Replacements, in_force: _InForce) -> None:
    """Put the deferred metrics around the beginning and the end of NeMo's evaluations."""
    from nemo_patches.options.deferred_metrics import replacement

    for target in METRIC_TARGETS:
        for owner in _owners([target]):
            if not replacements.has(owner, target.method):
                original = vars(owner)[target.method]
                ours = replacement(target.method, original, in_force)
                replacements.put(owner, target.method, ours)


def _stop_deferring(_: Replacements) -> None:
    from nemo_patches.options.deferred_metrics import deferred_metrics

    deferred_metrics.stop()


def _record_calls(replacements: Replacements, _: _InForce) -> None:
    """Begin or go on with the trace, and record the `forward` of every patched class."""
    from nemo_patches.tracing.recorded_forward import recorded
    from nemo_patches.tracing.recorder import tracing

    tracing.use(length_sync.current())
    for owner in _owners(TARGETS):
        if replacements.has(owner) and not replacements.has(owner, _FORWARD):
            # Not by inspect.getattr_static, which raises for a class in Python 3.13.0.
            original = next(
                vars(base)[_FORWARD] for base in owner.__mro__ if _FORWARD in vars(base)
            )
            own_name, forward = recorded(original)
            replacements.put(owner, _FORWARD, forward, own_name, original)


def _stop_recording(replacements: Replacements) -> None:
    from nemo_patches.tracing.recorder import tracing

    tracing.stop()
    replacements.take_out(_FORWARD)


def _trainer_exceptions(_: Settings) -> Any:
    from nemo_patches.tracing.trainer_exceptions import TrainerExceptions

    return TrainerExceptions()


def _stop_together(settings: Settings) -> Any:
    from nemo_patches.options.stop_together import StopTogether

    stages = settings.stop_together
    return StopTogether(training=TRAINING in stages, evaluation=EVALUATION in stages)


def _owners(targets: Iterable[Target]) -> Iterator[type]:
    """The classes of those that are imported."""
    for target in targets:
        module = sys.modules.get(target.module)
        owner = None if module is None else target.find_owner(module)
        if owner is not None:
            yield owner


TRACE = Part(
    setting="trace",
    module="nemo_patches.tracing.recorded_forward",
    begin=_record_calls,
    end=_stop_recording,
    callback=_trainer_exceptions,
)
PARTS = (
    TRACE,
    Part(
        setting="metrics",
        module="nemo_patches.options.deferred_metrics",
        targets=METRIC_TARGETS,
        others=METRIC_SUMS,
        begin=_defer_metrics,
        end=_stop_deferring,
        refusal="metrics cannot be deferred",
        left="metrics are not deferred",
    ),
    Part(
        setting="checkpoints",
        targets=CHECKPOINT_TARGETS,
        others=CHECKPOINT_BASES,
        begin=_agree_on_checkpoints,
        refusal="the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's)",
        left=_AS_STOCK,
    ),
    Part(
        setting="stop_together",
        module="nemo_patches.options.stop_together",
        callback=_stop_together,
    ),
)


def switched_on(settings: Settings) -> list[Part]:
    return [part for part in PARTS if part.is_on(settings)]


def import_targets(parts: Iterable[Part]) -> None:
    """NeMo's modules. One that is missing is a drift."""
    for part in parts:
        for target in part.targets + part.others:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(target.module)


def refusals(parts: Iterable[Part], replacements: Replacements) -> list[str]:
    """A sentence for each that cannot be patched."""
    problems = ((part, part.drift(replacements)) for part in parts)
    return [
        f"{part.refusal}: {' | '.join(found.values())}"
        for part, found in problems
        if found
    ]


def end_all(replacements: Replacements) -> None:
    for part in PARTS:
        if sys.modules.get(part.module) is not None:
            part.end(replacements)


def callbacks(settings: Settings) -> list[Any]:
    """For one of Lightning's trainers."""
    made = (part.callback(settings) for part in switched_on(settings))
    return [callback for callback in made if callback is not None]


def trace_file() -> str:
    """The file that is being written, or why there is none; empty without a trace."""
    if sys.modules.get(TRACE.module) is None:
        return ""
    from nemo_patches.tracing.recorder import tracing

    return tracing.where()
