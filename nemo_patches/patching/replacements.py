"""The attributes of NeMo's classes that this process has replaced, and how it restores them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import wrapt

from nemo_patches.patching.targets import Target
from nemo_patches.sync.own_syncs import subclass_check
from nemo_patches.sync.places import place_of, with_names
from nemo_patches.sync.rank_log import report

_ABSENT = object()


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
            title = f"{self.owner.__name__}.{self.name}"
            text = "it stays as it is, and what it may call of nemo_patches acts as NeMo's own"
            by = f"was patched again by others, {place_of(found)}"
            report(logging.WARNING, f"{title} {by}: {text} from now on")
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
        return any(
            made.owner is owner and name in ("", made.name) for made in self.made
        )

    def holds(self, target: Target) -> bool:
        """Whether this target's class, as it is imported now, is replaced in part."""
        module = sys.modules.get(target.module)
        return module is not None and self.has(target.find_owner(module))

    def patch(
        self, target: Target, module: ModuleType, in_force: Callable[[], bool]
    ) -> None:
        """Put the bounded sync into a target.

        in_force: false after a revert, even inside another wrapper.
        """
        owner = _owner(target, module)
        original = owner.__dict__[target.method]
        # Here, for it imports torch._dynamo: 2 s of CPU time that NeMo has spent anyway.
        from nemo_patches.sync import encoder_methods

        bounded = encoder_methods.make_bounded_update(
            original, _without_reduce(original), in_force
        )
        self.put(owner, target.method, bounded)
        if target.setter:
            self.put(
                owner,
                target.setter,
                encoder_methods.private_setter(owner.__dict__[target.setter], in_force),
            )
        check = subclass_check(owner, target.method, in_force)
        self.put(owner, "__init_subclass__", check)

    def restore(self) -> None:
        """Restore every attribute, the last first."""
        self.take_out_left()
        while self.made:
            if not (replacement := self.made.pop()).undo():
                self._inside_others.append(replacement)

    def take_out_left(self) -> None:
        """Undo replacements that were inside another wrapper at a revert(), if that has put ours
        back since.
        """
        for left in self._inside_others[::-1]:
            if left.owner.__dict__.get(left.name) is left.replacement:
                left.undo()
                self._inside_others.remove(left)

    def put(self, owner: type, name: str, replacement: object) -> None:
        """Replace an attribute, until restore()."""
        self.made.append(
            Replacement(owner, name, owner.__dict__.get(name, _ABSENT), replacement)
        )
        wrapt.apply_patch(owner, name, replacement)


def _owner(target: Target, module: ModuleType) -> type:
    owner = target.find_owner(module)
    assert owner is not None  # drift() has seen it
    return owner


class _WithoutGroup:
    """torch as NeMo's method sees it without a process group: it then grows the buffers and reduces
    nothing.
    """

    class distributed:
        @staticmethod
        def is_initialized() -> bool:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_reduce(original: FunctionType) -> Callable[..., None]:
    """NeMo's own method, whose growth differs from version to version, without its reduce."""

    def grow(encoder: Any, length: int, device: torch.device) -> None:
        with_names(original, {"torch": _WithoutGroup()})(encoder, length, device)

    return grow
