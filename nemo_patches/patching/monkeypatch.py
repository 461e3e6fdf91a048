"""Puts the runtime into the NeMo of this process, and takes it out again."""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import Any

import torch
import wrapt

from nemo_patches.patching import admission, start_up
from nemo_patches.patching.give_back import give_back_all
from nemo_patches.patching.start_up import COLLECTION, DISABLE_VARIABLE
from nemo_patches.patching.targets import TARGETS, DriftError, Target
from nemo_patches.stall import subscriber
from nemo_patches.stall.missing_rank import Stall
from nemo_patches.stall.rank_text import named
from nemo_patches.sync import length_sync
from nemo_patches.sync.encoder_methods import bounded, following_apply, private_setter
from nemo_patches.sync.length_sync import EncoderCounters
from nemo_patches.sync.rank_log import report
from nemo_patches.sync.settings import Settings, SettingsError, resolve
from nemo_patches.tracing import recorded_forward
from nemo_patches.tracing import settings as trace_settings
from nemo_patches.tracing.recorder import tracing
from nemo_patches.tracing.settings import TraceSettings

_ABSENT = object()
_FORWARD = "forward"


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
    trace: TraceSettings
    trace_file: str  # the file that is being written, or why there is none; empty without a trace
    encoders: tuple[EncoderCounters, ...]
    unannounced: tuple[int, ...]  # ranks without a sign of nemo_patches: not patched, or not at their first call yet
    stalls: tuple[Stall, ...]  # encoder calls that not every rank has come to, with the ranks that are missing

    def __str__(self) -> str:
        lines = [
            f"nemo {self.nemo}, torch {self.torch}",
            f"settings: {self.settings}{_and(self.trace)}",
            *([f"trace: {self.trace_file}"] if self.trace_file else []),
            "patched: " + (", ".join(self.patched) or "nothing"),
            *(f"skipped: {skipped.target}: {skipped.reason}" for skipped in self.skipped),
            *(
                f"{one.encoder}: {one.calls} calls, {one.rounds} rounds, {one.fallbacks} fallbacks, "
                f"{one.timeouts} timeouts, waited {one.waited / timedelta(seconds=1):.3f} s"
                + (f"; ended: {one.ended}" if one.ended else "")
                for one in self.encoders
            ),
        ]
        if self.unannounced:
            lines.append(f"not patched, or not at a first encoder call yet: {named(self.unannounced)}")
        lines += map(str, self.stalls)
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
_applied = False
_by_import = True  # whether the import hook's news are acted upon; the hook is there under auto-apply and after apply()
_complete = False  # whether nemo.collections.asr has been imported as a whole: from then on training may run


def apply(settings: Settings, trace: TraceSettings) -> None:
    """Patch every target of the installed NeMo, or only change the settings where that is done already.

    Raises DriftError, and patches nothing, where a target does not look as expected; UnsupportedNeMo;
    ModuleNotFoundError without NeMo.
    """
    global _by_import, _complete
    if admission.disabled():
        report(logging.WARNING, f"not patched, NeMo runs as stock: {DISABLE_VARIABLE}=1")
        return
    if _applied:
        before = length_sync.current(), tracing.settings_in_force()
        length_sync.use(settings)
        tracing.length_sync_changed(settings)
        _trace(trace)
        if before != (settings, trace):
            report(logging.INFO, f"settings changed: {settings}{_and(trace)} (before: {before[0]}{_and(before[1])})")
        return
    _by_import = _complete = False  # what is imported here is patched and said here
    found: dict[Target, ModuleType] = {}
    for target in TARGETS:
        module = _import(target)
        if module is not None:
            found[target] = module
    if built_in := next((version for target, module in found.items() if (version := target.built_in(module))), ""):
        _leave_alone(built_in, trace)
        return
    admission.require_supported(admission.nemo_version())
    if drift := [problem for target, module in found.items() if (problem := target.drift(module))]:
        raise DriftError(
            f"NeMo {admission.nemo_version()} is not as expected; nothing was patched. " + " | ".join(drift)
        )
    _begin(settings)
    _patch_all(found, trace)
    _collection_is_complete()
    start_up.install()


def on_import(name: str) -> None:
    """The import hook's news: the module `name` is complete, for the first time or by a reload.

    Under auto-apply a setting that is not allowed, a NeMo that is not supported and a target that has drifted leave
    all of NeMo as stock, and are said once.
    """
    if not _by_import:
        return
    if name == COLLECTION:
        _collection_is_complete()
        return
    target = next(target for target in TARGETS if target.module == name)
    module = sys.modules[name]
    if any(patch.owner is target.find_owner(module) for patch in _patches):
        return  # apply() has been here, or two finders have told
    try:
        if not _applied and admission.disabled():
            return
        if not _applied and (built_in := target.built_in(module)):
            _leave_alone(built_in, trace_settings.resolve())
            return
        settings = length_sync.current() if _applied else resolve()
        trace = tracing.settings_in_force() if _applied else trace_settings.resolve()
        admission.require_supported(admission.nemo_version())
        if problem := target.drift(module):
            raise DriftError(problem)
    except (SettingsError, admission.UnsupportedNeMo, DriftError) as error:
        if _applied and _complete:  # training may run, and what it runs with stays
            _skipped[target] = str(error)
            report(logging.ERROR, f"not patched: {error}")
        else:
            revert()
            _skipped.update(dict.fromkeys(TARGETS, str(error)))
            length_sync.use(Settings())  # a variable that is not allowed is said here, and not again by status()
            report(logging.ERROR, f"not patched, NeMo {admission.nemo_version()} runs as stock: {error}")
        return
    if not _applied:
        _begin(settings)
    _patch_all({target: module}, trace)
    if _complete:
        _say_patched((target,))


def revert() -> None:
    """Restore every patched attribute to the object it was, and give grown buffers back to their modules."""
    global _applied, _by_import, _complete
    _applied = _by_import = _complete = False
    tracing.stop()
    _restore_forwards()
    while _patches:
        _restore(_patches.pop())
    _patched.clear()
    _skipped.clear()
    give_back_all()


def status() -> Status:
    try:
        nemo = admission.nemo_version()
    except ModuleNotFoundError:
        nemo = "not installed"
    return Status(
        nemo=nemo,
        torch=torch.__version__,
        patched=tuple(map(str, _patched)),
        skipped=tuple(Skipped(str(target), reason) for target, reason in _skipped.items()),
        settings=length_sync.current(),
        trace=tracing.settings_in_force(),
        trace_file=tracing.where(),
        encoders=length_sync.counters(),
        unannounced=subscriber.unannounced(),
        stalls=subscriber.stalls(),
    )


def _leave_alone(built_in: str, trace: TraceSettings) -> None:
    """A vendored NeMo with one of the diffs: its own copy of the runtime does all, and twice would be wrong."""
    global _by_import
    _by_import = False
    reason = f"this NeMo has nemo_patches {built_in} built in; its settings are the NEMO_PATCHES_* variables"
    _skipped.clear()
    _skipped.update(dict.fromkeys(TARGETS, reason))
    _say(f"nothing to patch: {reason}" + (f"; {trace}: not available there" if trace.folder else ""))


def _begin(settings: Settings) -> None:
    global _applied, _by_import
    length_sync.use(settings)
    subscriber.subscribe()
    _skipped.clear()
    _applied = _by_import = True


def _collection_is_complete() -> None:
    global _complete
    if _complete:
        return
    _complete = True
    if not _applied:
        return
    for target in TARGETS:
        if target not in _patched:
            there = target.source_file() is not None
            _skipped[target] = "not imported yet; it is patched when it is" if there else "this NeMo does not have it"
    _say_patched(
        [target for target in TARGETS if target in _patched],
        "".join(f"; not patched: {target}: {reason}" for target, reason in _skipped.items()),
    )


def _say_patched(targets: Iterable[Target], without: str = "") -> None:
    names = ", ".join(map(str, targets)) or "nothing yet"
    versions = f"nemo {admission.nemo_version()}, torch {torch.__version__}"
    _say(f"patched {names} ({versions}; {length_sync.current()}{_and(tracing.settings_in_force())}){without}")


def _and(trace: TraceSettings) -> str:
    return f"; {trace}" if trace.folder else ""


def _say(text: str) -> None:
    # A spawned data-loader worker imports NeMo too; its rank has said it already.
    if not multiprocessing.current_process().daemon:
        report(logging.INFO, text)


def _import(target: Target) -> ModuleType | None:
    """The target's module. None where this NeMo does not have it, or where nobody has imported its collection yet."""
    # Nobody who trains ASR wants the NLP collection imported for our sake; the import hook sees it when it is.
    if target.module in sys.modules or not target.module.startswith(COLLECTION + "."):
        return sys.modules.get(target.module)
    importlib.import_module(COLLECTION)
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name != target.module:
            raise
        return None


def _patch_all(found: Mapping[Target, ModuleType], trace: TraceSettings) -> None:
    try:
        for target, module in found.items():
            _patch(target, module)
        _trace(trace)
    except BaseException:
        revert()  # never half a patch
        raise


def _patch(target: Target, module: ModuleType) -> None:
    owner = target.find_owner(module)
    assert owner is not None  # drift() has seen it
    original = owner.__dict__[target.method]
    _replace(owner, target.method, bounded(original, _without_reduce(original), _in_force))
    if target.setter:
        _replace(owner, target.setter, private_setter(owner.__dict__[target.setter], _in_force))
    _replace(owner, "_apply", following_apply(owner._apply))  # type: ignore[attr-defined]  # it is a Module
    _skipped.pop(target, None)
    if target not in _patched:  # a module that is reloaded has new classes
        _patched.append(target)


def _trace(trace: TraceSettings) -> None:
    """Have the targets' `forward` recorded, or not, as `trace` says; the same trace goes on."""
    if trace != tracing.settings_in_force():
        tracing.stop()
        if trace.folder:
            tracing.start(trace)
    recorded = {patch.owner for patch in _patches if patch.name == _FORWARD}
    if trace.folder:
        for owner in [patch.owner for patch in _patches if patch.name == "_apply" and patch.owner not in recorded]:
            original = inspect.getattr_static(owner, _FORWARD)
            name, replacement = recorded_forward.recorded(original)
            _replace(owner, name, original)
            _replace(owner, _FORWARD, replacement)
    else:
        _restore_forwards()


def _restore_forwards() -> None:
    for patch in [patch for patch in _patches if patch.name == _FORWARD]:
        at = _patches.index(patch)
        original = _patches[at - 1]  # under the other name, which ours needs if it stays
        del _patches[at - 1 : at + 1]
        if _restore(patch):
            _restore(original)


def _in_force() -> bool:
    return _applied


def _restore(patch: _Patch) -> bool:
    """Whether it could be done."""
    if patch.owner.__dict__.get(patch.name) is not patch.replacement:
        # Ours is inside somebody's wrapper: it stays, and does nothing any more.
        report(logging.WARNING, f"{patch.owner.__name__}.{patch.name} was patched again by others and stays as it is")
        return False
    if patch.original is _ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.original)
    return True


def _replace(owner: type, name: str, replacement: object) -> None:
    _patches.append(_Patch(owner, name, owner.__dict__.get(name, _ABSENT), replacement))
    wrapt.apply_patch(owner, name, replacement)


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
