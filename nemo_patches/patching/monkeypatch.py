"""Patches the NeMo of this process, by apply() or as its modules are imported, and reverts it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from types import ModuleType

from nemo_patches.growth import give_back_all
from nemo_patches.patching import (
    COLLECTION,
    DISABLE_VARIABLE,
    admission,
    imported,
    parts,
)
from nemo_patches.patching.parts import LEFT, Part, switched_on
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.start_lines import StartLines
from nemo_patches.patching.targets import TARGETS, DriftError, Target
from nemo_patches.sync import length_sync
from nemo_patches.sync.length_sync import current
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.watch import subscriber


class Patching:
    """What nemo_patches has done to NeMo's classes, and will do when more of them are imported."""

    def __init__(self) -> None:
        # For apply(), revert() and on_import(), which threads may call at once.
        self._lock = threading.RLock()
        self.replacements = Replacements()
        self.patched: list[Target] = []
        self.skipped: dict[Target, str] = {}
        self.in_force = False
        # Whether on_import() acts: the import hook is there under auto-apply, and after apply().
        self.follows_imports = True
        # Imported as a whole: from then on training may run.
        self._collection_complete = False
        self.refused = ""  # why the import hook patches nothing
        self._lines = StartLines(self.patched)

    def apply(self, settings: Settings, hook_installed: bool) -> bool:
        """Patch every target of the installed NeMo, or, if that is done, only change the settings.

        True if it has patched: what is imported or reloaded later is then the import hook's to
        patch. Raises DriftError, and patches nothing, where a target does not look as expected;
        UnsupportedNeMo; ModuleNotFoundError without NeMo; and, before anything is changed, what
        importing a setting's part raises.
        """
        if admission.is_disabled():
            report(
                logging.WARNING,
                f"not patched, NeMo runs as stock: {DISABLE_VARIABLE}=1",
            )
            return False
        wanted = switched_on(settings)
        with self._lock:
            if not self.in_force:  # what is imported here is patched and said here
                self.follows_imports = self._collection_complete = False
        # No import is under the lock: a thread that imports NeMo has Python's own, and waits for
        # ours in on_import().
        modules = imported.import_targets()
        parts.import_targets(wanted)
        with self._lock:
            if self.in_force:  # also where another thread has patched meanwhile
                self._change_settings(settings, wanted)
                return False
            left = imported.nothing_to_bound()
            modules = {
                target: module
                for target, module in modules.items()
                if target not in left
            }
            if modules or not left:
                admission.require_supported(admission.nemo_version())
            self.replacements.take_out_left()
            drift = [target.drift(module) for target, module in modules.items()]
            drift = [problem for problem in drift if problem]
            drift += parts.refusals(wanted, self.replacements)
            if drift:
                text = f"NeMo {admission.nemo_version()} is not as expected; nothing was patched"
                raise DriftError(f"{text}. {' | '.join(drift)}")
            self._lines.by_hand = not hook_installed
            self._begin(settings)
            self._patch(modules, wanted)
            self._say_collection_complete()
            return True

    def on_import(self, name: str) -> None:
        """For the import hook: the module `name` is complete, for the first time or by a reload.

        Under auto-apply a setting that is not allowed, a NeMo that is not supported and a target
        that has drifted leave all of NeMo as stock, and are said once.
        """
        with self._lock:
            if not self.follows_imports:
                return
            if name == COLLECTION:
                self._collection_imported()
            else:
                self._target_imported(
                    next(target for target in TARGETS if target.module == name)
                )

    def _target_imported(self, target: Target) -> None:
        module = sys.modules[target.module]
        if self.replacements.holds(target):
            return  # apply() has been here, or two finders have called
        modules = {} if target.nothing_to_bound(module) else {target: module}
        try:
            if not self.in_force and admission.is_disabled():
                return
            settings = current() if self.in_force else Settings.resolve()
            if modules:
                admission.require_supported(admission.nemo_version())
                if problem := target.drift(module):
                    raise DriftError(problem)
            trace = switched_on(settings, among=["trace"])
        except (
            SettingsError,
            admission.UnsupportedNeMo,
            DriftError,
            ImportError,
        ) as error:
            self.refuse(target, error)
            return
        if not self.in_force:
            self._begin(settings)
        self._patch(modules, trace)
        if self._collection_complete and modules:
            self._lines.say_patched((target,))

    def _collection_imported(self) -> None:
        skipped: dict[Target, str] = {}
        for setting, left in LEFT.items():
            settings = current()
            if self.in_force and parts.is_on(setting, settings):
                problems: dict[Target, str] = {}
                try:
                    part = parts.load(setting)
                    problems = part.drift(self.replacements)
                    why = " | ".join(problems.values())
                except Exception as error:  # nothing of ours may break NeMo's import
                    if raised_by_signal_handler(error):
                        raise
                    why = repr(error)
                if why:
                    skipped |= problems
                    length_sync.use(parts.without(setting, settings))
                    report(logging.ERROR, f"{left}: {why}")
                else:
                    self._begin_part(part)
        self._say_collection_complete()
        self.skipped.update(skipped)

    def revert(self) -> None:
        """Restore every patched attribute to its original object, and give grown buffers back to
        their modules.
        """
        with self._lock:
            self.in_force = self.follows_imports = self._collection_complete = False
            self._lines.end()
            length_sync.use(current().of_layer())
            parts.end_all(self.replacements)
            self.replacements.restore()
            subscriber.encoders_were_reverted()
            self.patched.clear()
            self.skipped.clear()
            give_back_all()
            self.refused = ""

    def settings_for_trainers(self) -> Settings:
        """Those in force, or that will be when NeMo is imported.

        Raises SettingsError for a bad switch.
        """
        if not self.in_force and self.follows_imports and admission.is_disabled():
            return Settings()
        return current()

    def _begin(self, settings: Settings) -> None:
        length_sync.use(settings)
        subscriber.subscribe()
        self.skipped.clear()
        self.in_force = self.follows_imports = True
        self._lines.begin()

    def _patch(
        self, modules: Mapping[Target, ModuleType], wanted: Iterable[Part]
    ) -> None:
        try:
            for target, module in modules.items():
                self.replacements.patch(target, module, lambda: self.in_force)
                self.skipped.pop(target, None)
                # A module that is reloaded has new classes.
                if target not in self.patched:
                    self.patched.append(target)
            for part in wanted:
                self._begin_part(part)
        except BaseException:
            self.revert()  # never half a patch
            raise

    def _begin_part(self, part: Part) -> None:
        def in_force() -> bool:
            return self.in_force and parts.is_on(part.setting, current())

        part.begin(self.replacements, in_force)

    def _change_settings(self, settings: Settings, wanted: list[Part]) -> None:
        before = current()
        if drift := parts.refusals(wanted, self.replacements):
            raise DriftError(f"{' | '.join(drift)}; nothing was changed")
        length_sync.use(settings)
        if parts.is_on("trace", before) and not parts.is_on("trace", settings):
            parts.load("trace").end(self.replacements)
        for part in wanted:
            self._begin_part(part)
        if before != settings:
            report(logging.INFO, f"settings changed: {settings} (before: {before})")

    def refuse(self, target: Target | None, error: Exception) -> None:
        """What the import hook does when apply() would raise.

        target: None: nothing of NeMo is imported yet.
        """
        # Training may run: leave it as it is.
        if target is not None and self.in_force and self._collection_complete:
            self.skipped[target] = str(error)
            report(logging.ERROR, f"not patched: {error}")
            return
        # A bad variable is logged here, and not again by status().
        length_sync.use(Settings())
        self.revert()
        self.refused = str(error)
        self.skipped.update(dict.fromkeys(TARGETS, self.refused))
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
        if not self.in_force:
            return
        left = imported.nothing_to_bound()
        for target in TARGETS:
            if target not in self.patched:
                exists = target.source_file() is not None
                reason = "this NeMo does not have it"
                if exists:
                    reason = "not imported yet; it is patched when it is"
                self.skipped[target] = left.get(target, reason)
        try:
            self._lines.collection_complete(self.skipped, left)
        except Exception as error:  # what is patched is so, whatever comes of the lines
            if raised_by_signal_handler(error):
                raise
            names = ", ".join(map(str, self.patched)) or "nothing"
            text = (
                f"patched: {names}; saying more has failed, please report it: {error!r}"
            )
            report(logging.ERROR, text)


this_process = Patching()
