"""Patches the NeMo of this process, by apply() or as its modules are imported, and reverts it; says what was done."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from nemo_patches.growth import give_back_all
from nemo_patches.patching import CALLBACK_CONNECTOR, COLLECTION, DISABLE_VARIABLE, admission
from nemo_patches.patching.process_status import Skipped, Status
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.settings import AllSettings
from nemo_patches.patching.targets import (
    CHECKPOINT_BASES,
    CHECKPOINT_TARGETS,
    METRIC_SUMS,
    METRIC_TARGETS,
    TARGETS,
    DriftError,
    Target,
)
from nemo_patches.stall import subscriber
from nemo_patches.stall.roll_call import AllAnnounced
from nemo_patches.stall.settings import StallSettings
from nemo_patches.sync import checkpoints, length_sync
from nemo_patches.sync.events import FlagIsOff, bus
from nemo_patches.sync.own_syncs import Owner, OwnSync, copies, own_syncs
from nemo_patches.sync.own_syncs import say as say_own_syncs
from nemo_patches.sync.rank_log import report
from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.tracing.dump import dumps
from nemo_patches.tracing.encoder_facts import configured_flag
from nemo_patches.tracing.recorder import tracing
from nemo_patches.tracing.settings import STDERR, TraceSettings
from nemo_patches.tracing.trace_header import rank_and_size
from nemo_patches.uneven.even_loader import even_loaders
from nemo_patches.uneven.parameter_watch import parameter_watch
from nemo_patches.uneven.settings import DEFERRED, STOCK, UnevenSettings

_NOT_AGREED = "the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's)"
_NOT_INHERITED = "a process that this one spawns must call apply() too"


class Patching:
    """What nemo_patches has done to NeMo's classes, and what it still does when more of them are imported."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of apply(), revert() and on_import(), which threads may call at once
        self.replacements = Replacements()
        self._patched: list[Target] = []
        self._skipped: dict[Target, str] = {}
        self._in_force = False
        # Whether on_import() acts: the import hook is there under auto-apply, and after apply().
        self._follows_imports = True
        self._collection_complete = False  # imported as a whole: from then on training may run
        self._misspelt_said = self._said_for_all = self._said_flag_is_off = False
        self._trace_settings = TraceSettings()  # in force
        self._uneven = UnevenSettings()  # in force
        self._said_of_uneven = ""
        self._by_hand = False  # by apply() alone: what this process spawns has no import hook
        self._refused = ""  # why the import hook patches nothing

    def apply(self, settings: AllSettings, hook_installed: bool) -> bool:
        """Patch every target of the installed NeMo, or only change the settings where that is done already.

        True if it has patched: what is imported or reloaded later is then the import hook's to patch.
        Raises DriftError, and patches nothing, where a target does not look as expected; UnsupportedNeMo;
        ModuleNotFoundError without NeMo.
        """
        if admission.disabled():
            report(logging.WARNING, f"not patched, NeMo runs as stock: {DISABLE_VARIABLE}=1")
            return False
        # No import is under the lock: a thread that imports NeMo has Python's own, and waits for ours in on_import().
        if self._in_force:
            _import_chosen(settings.uneven)
        with self._lock:
            if self._in_force:
                self._change_settings(settings)
                return False
            self._follows_imports = self._collection_complete = False  # what is imported here is patched and said here
        modules = {target: module for target in TARGETS if (module := _import(target)) is not None}
        _import_chosen(settings.uneven)
        with self._lock:
            if self._in_force:  # by another thread meanwhile
                self._change_settings(settings)
                return False
            if built_in := next(
                (version for target, module in modules.items() if (version := target.built_in(module))), ""
            ):
                self._leave_alone(built_in, settings)
                return False
            admission.require_supported(admission.nemo_version())
            self.replacements.take_out_left()
            drift = [problem for target, module in modules.items() if (problem := target.drift(module))]
            metric_drift, checkpoint_drift = (
                self._metric_drift(settings.uneven),
                self._checkpoint_drift(settings.uneven),
            )
            if checkpoint_drift:
                drift.append(f"{_NOT_AGREED}: {' | '.join(checkpoint_drift.values())}")
            if drift := drift + list(metric_drift.values()):
                raise DriftError(
                    f"NeMo {admission.nemo_version()} is not as expected; nothing was patched. " + " | ".join(drift)
                )
            self._by_hand = not hook_installed
            self._begin(settings)
            self._patch_all(modules, settings.trace)
            self._patch_chosen()
            self._say_collection_complete()
            return True

    def on_import(self, name: str) -> None:
        """For the import hook: the module `name` is complete, for the first time or by a reload.

        Under auto-apply a setting that is not allowed, a NeMo that is not supported and a target that has drifted leave
        all of NeMo as stock, and are said once.
        """
        with self._lock:
            self._on_import(name)

    def _on_import(self, name: str) -> None:
        if not self._follows_imports:
            return
        if name == CALLBACK_CONNECTOR:
            self._watch()
            return
        if name == COLLECTION:
            drift = self._metric_drift(self._uneven) if self._in_force else {}
            if drift:
                self._uneven = replace(self._uneven, metrics=STOCK)
                subscriber.use(subscriber.settings_in_force(), str(self._uneven))
                report(logging.ERROR, f"metrics are not deferred: {' | '.join(drift.values())}")
            if self._in_force and (problems := self._checkpoint_drift(self._uneven)):
                self._uneven = replace(self._uneven, checkpoints=STOCK)
                subscriber.use(subscriber.settings_in_force(), str(self._uneven), self._uneven.metrics == DEFERRED)
                report(
                    logging.ERROR, f"each rank decides about checkpoints, as in stock: {' | '.join(problems.values())}"
                )
                drift |= problems
            if self._in_force:
                self._patch_chosen()
            self._say_collection_complete()
            self._skipped.update(drift)
            return
        target = next(target for target in TARGETS if target.module == name)
        module = sys.modules[name]
        if self.replacements.has(target.find_owner(module)):
            return  # apply() has been here, or two finders have called
        try:
            if not self._in_force and admission.disabled():
                return
            if not self._in_force and (built_in := target.built_in(module)):
                self._leave_alone(built_in, AllSettings.resolve())
                return
            settings = self._settings_in_force() if self._in_force else AllSettings.resolve()
            admission.require_supported(admission.nemo_version())
            if problem := target.drift(module):
                raise DriftError(problem)
        except (SettingsError, admission.UnsupportedNeMo, DriftError) as error:
            self._refuse(target, error)
            return
        if not self._in_force:
            self._begin(settings)
        self._patch_all({target: module}, settings.trace)
        if self._collection_complete:
            self._say_patched((target,))

    def _watch(self) -> None:
        """Report the stalls of a job that trains with Lightning, as all of NeMo's do, also where it has no encoder."""
        try:
            if self._in_force or admission.disabled():
                return
            settings = AllSettings.resolve()
        except SettingsError as error:
            self._refuse(None, error)
            return
        length_sync.use(settings.sync)
        parameter_watch.use(settings.uneven.compare)
        subscriber.use(settings.stall)
        subscriber.subscribe()
        if settings.trace.folder in (None, STDERR):
            dumps.start(settings.trace.dump)

    def revert(self) -> None:
        """Restore every patched attribute to the object it was, and give grown buffers back to their modules."""
        with self._lock:
            self._revert()

    def _revert(self) -> None:
        self._in_force = self._follows_imports = self._collection_complete = False
        tracing.stop()
        dumps.stop()
        bus.unsubscribe("the line at the start")
        self._trace_settings = TraceSettings()
        self._uneven = UnevenSettings()
        parameter_watch.use(0)
        self.replacements.restore()
        subscriber.encoders_were_reverted()
        self._patched.clear()
        self._skipped.clear()
        give_back_all()
        self._refused = ""

    def status(self, hook_installed: bool) -> Status:
        try:
            nemo = admission.nemo_version()
        except ModuleNotFoundError:
            nemo = "not installed"
        state, why = self._state(nemo, hook_installed)
        own_syncs = self._own_syncs()
        if own_syncs:
            why = f"{why}, but not these length syncs: {', '.join(dict.fromkeys(own.title for own in own_syncs))}"
        return Status(
            nemo=nemo,
            torch=torch.__version__,
            patched=tuple(map(str, (*self._patched, *self._chosen_targets()))),
            skipped=tuple(Skipped(str(target), reason) for target, reason in self._skipped.items()),
            settings=length_sync.current(),
            stall_settings=subscriber.settings_in_force(),
            trace=self._trace_settings,
            trace_file=tracing.where(),
            encoders=length_sync.counters(),
            unannounced=subscriber.unannounced(),
            stalls=subscriber.stalls(),
            loaders=even_loaders.counters(),
            comparisons=parameter_watch.counters(),
            uneven=self.uneven_settings(),
            checkpoints=checkpoints.checkpoints.counters() if self._has_checkpoints() else None,
            own_syncs=tuple(own.text for own in own_syncs),
            state=state,
            why=why,
        )

    def _chosen_targets(self) -> Iterator[Target]:
        if self._defers_metrics():
            yield from METRIC_TARGETS
        if self._has_checkpoints():
            yield from CHECKPOINT_TARGETS

    def _own_syncs(self) -> tuple[OwnSync, ...]:
        """The classes that this process has with a length sync which is not ours."""
        loaded = ((target, sys.modules[target.module]) for target in TARGETS if target.module in sys.modules)
        owners = [
            Owner(kind, target.method, target.setter)
            for target, module in loaded
            if (kind := target.find_owner(module)) and (target in self._patched or target.built_in(module))
        ]
        methods = {owner.method for owner in owners}
        nemos = {(target.module, target.owner) for target in TARGETS}
        return (*(own for owner in owners for own in own_syncs(owner)), *copies(methods, nemos))

    def _state(self, nemo: str, hook_installed: bool) -> tuple[str, str]:
        """Whether this process is patched, in one of three words, and why."""
        if self._patched:
            return "on", f"{len([*self._patched, *self._chosen_targets()])} of NeMo's methods patched"
        loaded = ((target, sys.modules[target.module]) for target in TARGETS if target.module in sys.modules)
        if built_in := next((version for target, module in loaded if (version := target.built_in(module))), ""):
            return "on", _built_in_text(built_in)
        if nemo == "not installed":
            return "cannot be", f"NeMo is not installed for {sys.executable}"
        try:
            if admission.disabled():
                return "off here", f"{DISABLE_VARIABLE}=1; unset it, and apply() or `nemo-patches run` can switch it on"
            admission.require_supported(nemo)
        except (SettingsError, admission.UnsupportedNeMo) as error:
            return "cannot be", str(error)
        if self._refused:
            return "cannot be", self._refused
        if self._follows_imports and hook_installed:
            return "on", "NeMo's encoders are patched when they are imported, which has not happened yet"
        return "off here", f"nemo_patches.apply() or `nemo-patches run` switches it on; {_NOT_INHERITED}"

    def uneven_settings(self) -> UnevenSettings:
        """Those in force, else the environment's. A bad variable is said once, and not used."""
        if self._in_force or not self._follows_imports:
            return self._uneven
        try:
            return UnevenSettings() if admission.disabled() else UnevenSettings.resolve()
        except SettingsError as error:
            if str(error) != self._said_of_uneven:
                report(logging.ERROR, f"{error}; nothing is done about uneven batches")
            self._said_of_uneven = str(error)
            return UnevenSettings()

    def _begin(self, settings: AllSettings) -> None:
        self._uneven = settings.uneven
        parameter_watch.use(settings.uneven.compare)
        length_sync.use(settings.sync)
        subscriber.use(settings.stall, str(settings.uneven), settings.uneven.metrics == DEFERRED)
        subscriber.subscribe()
        starts: dict[type, Any] = {AllAnnounced: self._say_all_patched, FlagIsOff: self._say_flag_is_off}
        bus.subscribe("the line at the start", starts)
        self._skipped.clear()
        self._in_force = self._follows_imports = True
        self._say_misspelt()
        if rank_and_size()[0] == 0 and (text := admission.newer(admission.nemo_version())):
            _say(text, logging.WARNING)

    def _say_misspelt(self) -> None:
        if not self._misspelt_said:
            self._misspelt_said = True
            for sentence in admission.misspelt():
                _say(sentence, logging.WARNING)

    def _patch_all(self, modules: Mapping[Target, ModuleType], trace: TraceSettings) -> None:
        try:
            for target, module in modules.items():
                self.replacements.patch(target, module, lambda: self._in_force)
                self._skipped.pop(target, None)
                if target not in self._patched:  # a module that is reloaded has new classes
                    self._patched.append(target)
            self._trace(trace)
        except BaseException:
            self.revert()  # never half a patch
            raise

    def _trace(self, trace: TraceSettings) -> None:
        """Have the encoders' calls recorded, or only the last ones kept, as `trace` says; the same trace goes on."""
        if trace != self._trace_settings:
            tracing.stop()
            if trace.folder:
                tracing.start(trace)
        self._trace_settings = trace
        if trace.folder in (None, STDERR):  # there is no file of them
            dumps.start(trace.dump)
        else:
            dumps.stop()
        if trace.folder:
            self.replacements.record_forwards()
        else:
            self.replacements.restore_forwards()

    def _metric_drift(self, uneven: UnevenSettings) -> dict[Target, str]:
        """Why metrics cannot be deferred, where they are to be and are not yet."""
        is_wanted = uneven.metrics == DEFERRED and not self._is_patched(METRIC_TARGETS[0])
        return _drift(METRIC_TARGETS + METRIC_SUMS) if is_wanted else {}

    def _checkpoint_drift(self, uneven: UnevenSettings) -> dict[Target, str]:
        """Why the ranks cannot agree on checkpoints, where they are to and do not yet."""
        is_wanted = uneven.checkpoints != STOCK and not self._is_patched(CHECKPOINT_TARGETS[0])
        return _drift(CHECKPOINT_TARGETS + CHECKPOINT_BASES) if is_wanted else {}

    def _is_patched(self, target: Target) -> bool:
        module = sys.modules.get(target.module)
        return module is not None and self.replacements.has(target.find_owner(module))

    def _defers_metrics(self) -> bool:
        return self._in_force and self._uneven.metrics == DEFERRED

    def _agrees_on_checkpoints(self) -> bool:
        return self._in_force and self._uneven.checkpoints != STOCK

    def _has_checkpoints(self) -> bool:
        return self._agrees_on_checkpoints() and self._is_patched(CHECKPOINT_TARGETS[0])

    def _patch_chosen(self) -> None:
        """What settings choose, beside the encoders."""
        if self._uneven.metrics == DEFERRED:
            self.replacements.defer_metrics(self._defers_metrics)
        if self._uneven.checkpoints != STOCK:
            self.replacements.agree_on_checkpoints(self._agrees_on_checkpoints)

    def _change_settings(self, settings: AllSettings) -> None:
        before, uneven = self._settings_in_force(), settings.uneven
        if drift := self._metric_drift(uneven):
            raise DriftError(f"metrics cannot be deferred, nothing was changed: {' | '.join(drift.values())}")
        if drift := self._checkpoint_drift(uneven):
            raise DriftError(f"{_NOT_AGREED}, nothing was changed: {' | '.join(drift.values())}")
        self._uneven = uneven
        parameter_watch.use(uneven.compare)
        self._patch_chosen()
        length_sync.use(settings.sync)
        subscriber.use(settings.stall, str(uneven), uneven.metrics == DEFERRED)
        tracing.length_sync_changed(settings.sync)
        self._trace(settings.trace)
        if before != self._settings_in_force():
            report(logging.INFO, f"settings changed: {self._settings_in_force()} (before: {before})")

    def _settings_in_force(self) -> AllSettings:
        return AllSettings(length_sync.current(), subscriber.settings_in_force(), self._trace_settings, self._uneven)

    def _leave_alone(self, built_in: str, settings: AllSettings) -> None:
        """A vendored NeMo with one of the diffs: its own copy of the sync does all, and twice would be wrong."""
        self._follows_imports = False
        subscriber.encoders_were_reverted()
        dumps.stop()
        self._say_misspelt()
        reason = _built_in_text(built_in)
        self._skipped.clear()
        self._skipped.update(dict.fromkeys(TARGETS, reason))
        others = replace(settings.uneven, checkpoints=UnevenSettings().checkpoints)  # whose variable holds there, too
        missing = ", ".join(filter(None, (str(settings.trace) if settings.trace.folder else "", str(others))))
        _say(f"nothing to patch: {reason}" + (f"; {missing}: not available there" if missing else ""))

    def _refuse(self, target: Target | None, error: Exception) -> None:
        """What the import hook does where apply() would raise."""
        if target is not None and self._in_force and self._collection_complete:  # training may run: it goes on so
            self._skipped[target] = str(error)
            report(logging.ERROR, f"not patched: {error}")
            return
        self.revert()
        self._refused = str(error)
        self._skipped.update(dict.fromkeys(TARGETS, self._refused))
        subscriber.use(StallSettings())
        length_sync.use(Settings())  # a variable that is not allowed is said here, and not again by status()
        try:
            nemo = admission.nemo_version()
        except ModuleNotFoundError:  # Lightning is here without it
            nemo = "itself"
        report(logging.ERROR, f"not patched, NeMo {nemo} runs as stock: {error}")

    def _say_collection_complete(self) -> None:
        """Say in one line, and once, what was patched and what was not."""
        if self._collection_complete:
            return
        self._collection_complete = True
        if not self._in_force:
            return
        for target in TARGETS:
            if target not in self._patched:
                exists = target.source_file() is not None
                reason = "not imported yet; it is patched when it is" if exists else "this NeMo does not have it"
                self._skipped[target] = reason
        self._say_patched([target for target in TARGETS if target in self._patched])
        say_own_syncs(self._own_syncs())
        for target, reason in self._skipped.items():
            _say(f"not patched: {target}: {reason}", logging.DEBUG)
        _say(f"settings: {self._settings_in_force()}", logging.DEBUG)

    def _say_patched(self, targets: Iterable[Target]) -> None:
        if rank_and_size()[1] == 1:  # else rank 0 says it for all, when each has come to its first encoder call
            _say(f"patched {self._what(targets)}" + (f"; {_NOT_INHERITED}" if self._by_hand else ""))

    def _say_all_patched(self, event: AllAnnounced) -> None:
        """On the stall monitor's thread. Once: a new process group has the same ranks, or is said to lack some."""
        if not self._said_for_all:
            self._said_for_all = True
            patched = (target for target in TARGETS if target in self._patched)
            _say(f"patched on all {event.size} ranks: {self._what(patched)}{_ignored_flags()}")
            say_own_syncs(self._own_syncs())  # made since, where a class of theirs keeps ours from being asked

    def _say_flag_is_off(self, event: FlagIsOff) -> None:
        """On the training thread, at a first call. This rank speaks for itself: another's flag may be on."""
        if not self._said_flag_is_off and event.sync.group.rank == 0:
            self._said_flag_is_off = True
            configured = configured_flag(event.encoder)
            differs = "" if configured in ("false", "?") else f" (in the config that it was made from: {configured})"
            _say(
                f"patched: {event.sync.title} grows privately, and has no length sync: its own "
                f"sync_max_audio_length is false{differs}; stall reports watch the job all the same"
            )

    def _what(self, targets: Iterable[Target]) -> str:
        names = ", ".join(target.owner for target in targets) or "nothing yet"
        versions = f"nemo {admission.nemo_version()}, torch {torch.__version__}"
        return f"{names} ({versions}; {self._settings_in_force().short()})"


def _built_in_text(version: str) -> str:
    return f"this NeMo has nemo_patches {version} built in; its settings are the NEMO_PATCHES_* variables"


def _ignored_flags() -> str:
    """Of the encoders that have been called: those that sync although their config says that they do not."""
    group_syncs = length_sync.process.group_syncs
    encoders = [reference() for reference in group_syncs.by_encoder.keyrefs()] if group_syncs is not None else []
    syncing = (one for one in encoders if one is not None and getattr(one, "sync_max_audio_length", True))
    names = sorted({type(one).__name__ for one in syncing if configured_flag(one) == "false"})
    said = "sync_max_audio_length is false in the config that it was made from, and not in force"
    return "".join(f"; {name}: {said}" for name in names)


this_process = Patching()


def _say(text: str, level: int = logging.INFO) -> None:
    # A spawned data-loader worker imports NeMo too; its rank has said it already.
    if not multiprocessing.current_process().daemon:
        report(level, text)


def _import_chosen(uneven: UnevenSettings) -> None:
    """What settings choose, beside the encoders. Without it, _drift() says so."""
    chosen = METRIC_TARGETS + METRIC_SUMS if uneven.metrics == DEFERRED else ()
    for target in chosen + (CHECKPOINT_TARGETS + CHECKPOINT_BASES if uneven.checkpoints != STOCK else ()):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(target.module)


def _drift(targets: Iterable[Target]) -> dict[Target, str]:
    """Of targets that are imported for it: how each differs from what is known, where it does."""
    problems = {}
    for target in targets:
        try:
            problems[target] = target.drift(importlib.import_module(target.module))
        except ModuleNotFoundError as error:
            problems[target] = f"{target}: {error}"
    return {target: problem for target, problem in problems.items() if problem}


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
