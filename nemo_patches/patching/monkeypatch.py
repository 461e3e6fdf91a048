"""Puts the runtime into the NeMo of this process, and takes it out again."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import Any

import torch
import wrapt

from nemo_patches.patching.targets import TARGETS, DriftError, Target
from nemo_patches.runtime import length_sync
from nemo_patches.runtime.length_sync import EncoderCounters, synced_length
from nemo_patches.runtime.private_growth import apply_to_grown, give_back_all, grown_privately, happened
from nemo_patches.runtime.reporting import report
from nemo_patches.runtime.settings import Settings

_ABSENT = object()


@dataclass(frozen=True)
class Skipped:
    """A target that is not patched, and why."""

    target: str
    reason: str


@dataclass(frozen=True)
class Status:
    """What nemo_patches does in this process. Prints well."""

    nemo: str
    torch: str
    patched: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    settings: Settings
    encoders: tuple[EncoderCounters, ...]

    def __str__(self) -> str:
        lines = [
            f"nemo {self.nemo}, torch {self.torch}",
            f"settings: {self.settings}",
            "patched: " + (", ".join(self.patched) or "nothing"),
            *(f"skipped: {skipped.target}: {skipped.reason}" for skipped in self.skipped),
            *(
                f"{one.encoder}: {one.calls} calls, {one.rounds} rounds, {one.fallbacks} fallbacks, "
                f"{one.timeouts} timeouts, waited {one.waited / timedelta(seconds=1):.3f} s"
                + (f"; ended: {one.ended}" if one.ended else "")
                for one in self.encoders
            ),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Patch:
    """One attribute that was replaced; `original` is _ABSENT where the class had only inherited it."""

    owner: type
    name: str
    original: object
    replacement: object


_patches: list[_Patch] = []
_patched: list[Target] = []
_skipped: dict[Target, str] = {}
_hooked: set[Target] = set()  # targets that are patched once somebody imports their module
_applied = False


def apply(settings: Settings) -> None:
    """Patch every target of the installed NeMo, or only change the settings where that is done already.

    Raises DriftError, and patches nothing, where a target does not look as expected; ModuleNotFoundError without NeMo.
    """
    global _applied
    if _applied:
        before = length_sync.current()
        length_sync.use(settings)
        if before != settings:
            report(logging.INFO, f"settings changed: {settings} (before: {before})")
        return
    found: dict[Target, ModuleType] = {}
    skipped: dict[Target, str] = {}
    for target in TARGETS:
        module = _import(target, skipped)
        if module is not None:
            found[target] = module
    drift = [problem for target, module in found.items() if (problem := target.drift(module))]
    if drift:
        raise DriftError(f"NeMo {_nemo_version()} is not as expected; nothing was patched. " + " | ".join(drift))
    length_sync.use(settings)
    _applied = True
    _skipped.clear()
    _skipped.update(skipped)
    try:
        for target, module in found.items():
            _patch(target, module)
    except BaseException:
        revert()  # never half a patch
        raise
    names = ", ".join(map(str, _patched)) or "nothing yet"
    without = "".join(f"; not patched: {target}: {reason}" for target, reason in _skipped.items())
    report(logging.INFO, f"patched {names} (nemo {_nemo_version()}, torch {torch.__version__}; {settings}){without}")


def revert() -> None:
    """Restore every patched attribute to the object it was, and give grown buffers back to their modules."""
    global _applied
    _applied = False
    while _patches:
        patch = _patches.pop()
        if patch.owner.__dict__.get(patch.name) is not patch.replacement:
            # Ours is inside somebody's wrapper: it stays, and does nothing any more.
            report(
                logging.WARNING, f"{patch.owner.__name__}.{patch.name} was patched again by others and stays as it is"
            )
        elif patch.original is _ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.original)
    _patched.clear()
    _skipped.clear()
    give_back_all()


def status() -> Status:
    return Status(
        nemo=_nemo_version(),
        torch=torch.__version__,
        patched=tuple(map(str, _patched)),
        skipped=tuple(Skipped(str(target), reason) for target, reason in _skipped.items()),
        settings=length_sync.current(),
        encoders=length_sync.counters(),
    )


def _import(target: Target, skipped: dict[Target, str]) -> ModuleType | None:
    if target.module in sys.modules:
        return sys.modules[target.module]
    package = ".".join(target.module.split(".")[:3])
    if package != "nemo.collections.asr":
        # Nobody who trains ASR wants the NLP collection imported for our sake; it is patched when somebody imports it.
        if _exists(target.module):
            skipped[target] = "not imported yet; it is patched when it is"
            _patch_when_imported(target)
        else:
            skipped[target] = "this NeMo does not have it"
        return None
    importlib.import_module(package)  # without NeMo: the error that says so
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name != target.module:
            raise
        skipped[target] = "this NeMo does not have it"
        return None


def _exists(module: str) -> bool:
    """Whether the module's file is there, without importing any package of the collection."""
    spec = importlib.util.find_spec("nemo.collections")
    relative = module.removeprefix("nemo.collections.").split(".")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return any(pathlib.Path(place, *relative).with_suffix(".py").is_file() for place in places)


def _patch_when_imported(target: Target) -> None:
    if target not in _hooked:
        _hooked.add(target)
        wrapt.register_post_import_hook(functools.partial(_patch_late, target), target.module)


def _patch_late(target: Target, module: ModuleType) -> None:
    """An exception here would fail NeMo's import: a target that has drifted is said and left as it is."""
    if not _applied or target in _patched:
        return
    problem = target.drift(module)
    if problem:
        _skipped[target] = problem
        report(logging.ERROR, f"not patched: {problem}")
        return
    _skipped.pop(target, None)
    _patch(target, module)
    report(logging.INFO, f"patched {target}")


def _patch(target: Target, module: ModuleType) -> None:
    owner = target.find_owner(module)
    assert owner is not None  # drift() has seen it
    _replace(owner, target.method, _bounded(owner.__dict__[target.method]))
    if target.setter:
        _replace(owner, target.setter, _private_setter(owner.__dict__[target.setter]))
    _replace(owner, "_apply", _following_apply(owner._apply))  # type: ignore[attr-defined]  # it is a Module
    _patched.append(target)


def _replace(owner: type, name: str, replacement: object) -> None:
    _patches.append(_Patch(owner, name, owner.__dict__.get(name, _ABSENT), replacement))
    wrapt.apply_patch(owner, name, replacement)


# The replacements are plain functions and not wrapt's wrapper objects: torch.compile traces through a plain function
# and breaks the graph at an object that it does not know.


def _bounded(original: FunctionType) -> Callable[..., None]:
    """`update_max_seq_length(self, seq_length, device)` with the bounded sync in place of the reduce."""
    grow = _without_reduce(original)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile runs it as it is, like stock's reduce
    def sync_and_grow(encoder: Any, seq_length: int, device: torch.device) -> None:
        length = synced_length(encoder, seq_length)
        if length > encoder.max_audio_length:
            with grown_privately(encoder):
                grow(encoder, length, device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def grow_alone(encoder: Any, seq_length: int, device: torch.device) -> None:
        with grown_privately(encoder):
            original(encoder, seq_length, device)

    @functools.wraps(original)
    def update(self: Any, seq_length: int, device: torch.device) -> None:
        if _applied and _distributed():
            sync_and_grow(self, seq_length, device)
        elif happened():  # the process group is gone, or hidden for a while: what is private must stay so
            grow_alone(self, seq_length, device)
        else:
            original(self, seq_length, device)

    return update


def _distributed() -> bool:
    """Looked up at each call: some NeMo code replaces torch.distributed.is_initialized for a while."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _private_setter(original: FunctionType) -> Callable[..., None]:
    """`set_max_audio_length(self, max_audio_length)`, which others than the sync call too, with private growth."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def set_privately(encoder: Any, max_audio_length: int) -> None:
        with grown_privately(encoder, register_new=True):
            original(encoder, max_audio_length)

    @functools.wraps(original)
    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        if happened() or (_applied and _distributed()):
            set_privately(self, max_audio_length)
        else:
            original(self, max_audio_length)

    return set_max_audio_length


def _following_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return apply_to_grown(self, functools.partial(original, self, fn, *args, **kwargs), fn)

    return _apply


class _WithoutGroup:
    """torch as NeMo's method sees it where there is no process group: it grows the buffers and reduces nothing."""

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


def _nemo_version() -> str:
    try:
        return importlib.metadata.version("nemo_toolkit")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("nemo"), "__version__", "not installed"))
