"""The attributes of NeMo's classes that this process has replaced: how they are replaced and restored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import wrapt

from nemo_patches.patching.targets import TARGETS, Target
from nemo_patches.sync.encoder_methods import make_bounded_update, private_setter
from nemo_patches.sync.own_syncs import watching
from nemo_patches.sync.places import place_of
from nemo_patches.sync.rank_log import report

_ABSENT = object()
_FORWARD = "forward"
_SYNCS = {target.method for target in TARGETS}


@dataclass(frozen=True)
class Replacement:
    """One replaced attribute; `original` is _ABSENT if the class had only inherited it."""

    owner: type
    name: str
    original: object
    replacement: object

    def undo(self) -> bool:
        """Whether it could be done."""
        found = self.owner.__dict__.get(self.name)
        if found is not self.replacement:
            title, by = f"{self.owner.__name__}.{self.name}", place_of(found)
            text = "it stays as it is, and what it may call of nemo_patches acts as NeMo's own from now on"
            report(logging.WARNING, f"{title} was patched again by others, {by}: {text}")
            return False
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


class Replacements:
    """All replacements in force, in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Replacement] = []
        self._inside_others: list[Replacement] = []  # not undone

    def has(self, owner: type | None, name: str = "") -> bool:
        """Whether an attribute of this class is replaced: the one of this name, or any."""
        return any(made.owner is owner and name in ("", made.name) for made in self.made)

    def patch(self, target: Target, module: ModuleType, in_force: Callable[[], bool]) -> None:
        """Put the bounded sync into a target. in_force: false after a revert, even inside another wrapper."""
        owner = _owner(target, module)
        original = owner.__dict__[target.method]
        self.put(owner, target.method, make_bounded_update(original, _without_reduce(original), in_force))
        if target.setter:
            self.put(owner, target.setter, private_setter(owner.__dict__[target.setter], in_force))
        self.put(owner, "__init_subclass__", watching(owner, target.method, in_force))

    def record_forwards(self) -> None:
        """Record the `forward` of every patched class, unless it is recorded already."""
        from nemo_patches.tracing.recorded_forward import recorded

        with_forward = {replacement.owner for replacement in self.made if replacement.name == _FORWARD}
        patched = [replacement.owner for replacement in self.made if replacement.name in _SYNCS]
        for owner in patched:
            if owner not in with_forward:
                # Not by inspect.getattr_static, which raises for a class in Python 3.13.0.
                original = next(vars(base)[_FORWARD] for base in owner.__mro__ if _FORWARD in vars(base))
                own_name, forward = recorded(original)
                self.put(owner, own_name, original)
                self.put(owner, _FORWARD, forward)

    def restore_forwards(self) -> None:
        for forward in [replacement for replacement in self.made if replacement.name == _FORWARD]:
            place = self.made.index(forward)
            original = self.made[place - 1]  # under the other name, which ours needs if it stays
            del self.made[place - 1 : place + 1]
            if forward.undo():
                original.undo()

    def restore(self) -> None:
        """Restore every attribute, the last first."""
        self.take_out_left()
        self.restore_forwards()
        while self.made:
            if not (replacement := self.made.pop()).undo():
                self._inside_others.append(replacement)

    def take_out_left(self) -> None:
        """Undo replacements that were inside another wrapper at a revert(), if that has put ours back since."""
        for left in self._inside_others[::-1]:
            if left.owner.__dict__.get(left.name) is left.replacement:
                left.undo()
                self._inside_others.remove(left)

    def put(self, owner: type, name: str, replacement: object) -> None:
        """Replace an attribute, until restore()."""
        self.made.append(Replacement(owner, name, owner.__dict__.get(name, _ABSENT), replacement))
        wrapt.apply_patch(owner, name, replacement)


def _owner(target: Target, module: ModuleType) -> type:
    owner = target.find_owner(module)
    assert owner is not None  # drift() has seen it
    return owner


class _WithoutGroup:
    """torch as NeMo's method sees it without a process group: it then grows the buffers and reduces nothing."""

    class distributed:
        @staticmethod
        def is_initialized() -> bool:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_reduce(original: FunctionType) -> Callable[..., None]:
    """NeMo's own method, whose growth differs from version to version, without its reduce."""

    def grow(encoder: Any, length: int, device: torch.device) -> None:
        names = {**original.__globals__, "torch": _WithoutGroup()}
        function = FunctionType(
            original.__code__, names, original.__name__, original.__defaults__, original.__closure__
        )
        function(encoder, length, device)

    return grow
