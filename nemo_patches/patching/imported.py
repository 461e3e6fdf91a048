"""NeMo's classes in this process: which are there, drifted, or have a sync of their own or none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType

from nemo_patches.patching import COLLECTION
from nemo_patches.patching.targets import TARGETS, Target
from nemo_patches.sync.own_syncs import overrides


def import_targets() -> dict[Target, ModuleType]:
    """Those that this NeMo has, with their modules."""
    modules = {target: _import_target(target) for target in TARGETS}
    return {target: module for target, module in modules.items() if module is not None}


def _import_target(target: Target) -> ModuleType | None:
    """The target's module.

    None if this NeMo does not have it, or its collection is not imported yet.
    """
    # Do not import the NLP collection for ASR training; the import hook sees it when it is
    # imported.
    if target.module in sys.modules or not target.module.startswith(COLLECTION + "."):
        return sys.modules.get(target.module)
    importlib.import_module(COLLECTION)
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name != target.module:
            raise
        return None


def drift(targets: Iterable[Target]) -> dict[Target, str]:
    """Import the targets; return how each differs from what is known, if it does."""
    problems = {}
    for target in targets:
        try:
            problems[target] = target.drift(importlib.import_module(target.module))
        except ModuleNotFoundError as error:
            problems[target] = f"{target}: {error}"
    return {target: problem for target, problem in problems.items() if problem}


def nothing_to_bound() -> dict[Target, str]:
    """The targets that are left as they are, and why: a diff has bounded them, or they have no
    reduce.
    """
    reasons = {
        target: target.nothing_to_bound(module) for target, module in _loaded_modules()
    }
    return {target: reason for target, reason in reasons.items() if reason}


def find_overrides(patched: Collection[Target]) -> dict[str, str]:
    """A sentence for each class in this process that overrides a bounded length sync, by the
    override's name.
    """
    found: dict[str, str] = {}
    for target, module in _loaded_modules():
        owner = target.find_owner(module)
        if owner is not None and (target in patched or target.nothing_to_bound(module)):
            found |= overrides(owner, target.method)
    return found


def _loaded_modules() -> Iterator[tuple[Target, ModuleType]]:
    for target in TARGETS:
        if target.module in sys.modules:
            yield target, sys.modules[target.module]
