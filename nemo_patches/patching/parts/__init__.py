"""What settings switch on in addition to the encoders' sync: a module here for each, by its name.

It is imported when its setting is on, with all of ours that it needs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from nemo_patches.patching.imported import drift
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import Target
from nemo_patches.sync.settings import STOCK, Settings

# Those that replace methods beside the encoders', and what is said where they cannot as NeMo is
# imported.
LEFT = {
    "metrics": "metrics are not deferred",
    "checkpoints": "each rank decides about checkpoints, as in stock",
}
WITH_CALLBACKS = ("trace", "stop_together")
PARTS = (*WITH_CALLBACKS, *LEFT)
InForce = Callable[[], bool]


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """What one setting switches on: a module has its own as PART.

    targets: NeMo's methods that are replaced together, or not at all. others: what else must look
    as expected. refusal: what cannot be done where NeMo differs. begin: replaces them, unless they
    are. end: gives back, at a revert, what has begun. callback: for each of Lightning's trainers.
    """

    setting: str
    targets: tuple[Target, ...] = ()
    others: tuple[Target, ...] = ()
    refusal: str = ""
    begin: Callable[[Replacements, InForce], None] = _nothing
    end: Callable[[Replacements], None] = _nothing
    callback: Callable[[Settings], Any] = _nothing

    def drift(self, replacements: Replacements) -> dict[Target, str]:
        """Why it cannot be patched, if it is not yet."""
        is_patched = any(map(replacements.holds, self.targets))
        return {} if is_patched else drift(self.targets + self.others)


def is_on(setting: str, settings: Settings) -> bool:
    value = getattr(settings, setting)
    return bool(value) and value != STOCK


def load(setting: str) -> Part:
    """Raises what its import raises."""
    module = importlib.import_module(f"{__name__}.{setting}")
    return cast(Part, module.PART)


def switched_on(settings: Settings, among: Iterable[str] = PARTS) -> list[Part]:
    """Raises what their imports raise."""
    return [load(setting) for setting in among if is_on(setting, settings)]


def without(setting: str, settings: Settings) -> Settings:
    as_stock: dict[str, Any] = {setting: STOCK}
    return replace(settings, **as_stock)


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
    for setting in PARTS:
        if (module := sys.modules.get(f"{__name__}.{setting}")) is not None:
            module.PART.end(replacements)


def trace_file() -> str:
    """The file that is being written, or why there is none; empty without a trace."""
    module = sys.modules.get(f"{__name__}.trace")
    return "" if module is None else str(module.tracing.where())
