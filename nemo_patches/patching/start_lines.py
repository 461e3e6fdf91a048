"""The log lines about patching in this process, each once: what is patched, with which settings, and what is not."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from nemo_patches.patching import admission
from nemo_patches.patching.imported import nothing_to_bound, overridden
from nemo_patches.patching.settings import AllSettings
from nemo_patches.patching.targets import TARGETS, Target
from nemo_patches.stall.roll_call import AllAnnounced
from nemo_patches.sync import length_sync
from nemo_patches.sync.events import FlagIsOff, bus
from nemo_patches.sync.own_syncs import say as say_own_syncs
from nemo_patches.sync.rank_log import rank_and_size, report

NOT_INHERITED = "a process that this one spawns must call apply() too"
_SUBSCRIBER = "the line at the start"


class StartLines:
    """Of this process."""

    def __init__(self, patched: Collection[Target], settings: Callable[[], AllSettings]) -> None:
        """patched: may change. settings: those in force."""
        self._patched, self._settings = patched, settings
        self.by_hand = False  # by apply() only: processes that this one spawns have no import hook
        self._said_misspelt = self._said_for_all = self._said_flag_is_off = False

    def begin(self) -> None:
        starts: dict[type, Any] = {AllAnnounced: self._all_patched, FlagIsOff: self._flag_is_off}
        bus.subscribe(_SUBSCRIBER, starts)
        self.misspelt()
        if rank_and_size()[0] == 0 and (text := admission.newer(admission.nemo_version())):
            say(text, logging.WARNING)

    def end(self) -> None:
        bus.unsubscribe(_SUBSCRIBER)

    def misspelt(self) -> None:
        if not self._said_misspelt:
            self._said_misspelt = True
            for sentence in admission.misspelt():
                say(sentence, logging.WARNING)

    def collection_complete(self, skipped: Mapping[Target, str], left: Mapping[Target, str]) -> None:
        """skipped: what is not patched, and why; left: of these, what has no reduce of stock's."""
        if self._patched or not left:
            self.patched([target for target in TARGETS if target in self._patched])
        for reason in dict.fromkeys(left.values()):
            owners = ", ".join(target.owner for target in left if left[target] == reason)
            say(f"left as it is: {owners}: {reason}; stall reports watch the job")
        say_own_syncs(overridden(self._patched).values())
        for target, reason in skipped.items():
            say(f"not patched: {target}: {reason}", logging.DEBUG)
        say(f"settings: {self._settings()}", logging.DEBUG)

    def patched(self, targets: Iterable[Target]) -> None:
        if rank_and_size()[1] == 1:  # otherwise rank 0 logs it for all, at their first encoder calls
            say(f"patched {self._what(targets)}" + (f"; {NOT_INHERITED}" if self.by_hand else ""))

    def _all_patched(self, event: AllAnnounced) -> None:
        """On the stall monitor's thread. Once: a new process group has the same ranks, or is said to lack some."""
        if not self._said_for_all and (self._patched or not nothing_to_bound()):
            self._said_for_all = True
            patched = (target for target in TARGETS if target in self._patched)
            say(f"patched on all {event.size} ranks: {self._what(patched)}{_ignored_flags()}")
            say_own_syncs(
                overridden(self._patched).values()
            )  # made since, where a class of theirs keeps ours from being asked

    def _flag_is_off(self, event: FlagIsOff) -> None:
        """On the training thread, at a first call. This rank speaks for itself: another's flag may be on."""
        if not self._said_flag_is_off and event.sync.group.rank == 0:
            self._said_flag_is_off = True
            configured = _configured_flag(event.encoder)
            differs = "" if configured in ("false", "?") else f" (in the config that it was made from: {configured})"
            say(
                f"patched: {event.sync.title} grows privately, and has no length sync: its own "
                f"sync_max_audio_length is false{differs}; stall reports watch the job all the same"
            )

    def _what(self, targets: Iterable[Target]) -> str:
        names = ", ".join(target.owner for target in targets) or "nothing yet"
        versions = f"nemo {admission.nemo_version()}, torch {torch.__version__}"
        return f"{names} ({versions}; {self._settings().short()})"


def say(text: str, level: int = logging.INFO) -> None:
    # A spawned data loader worker imports NeMo, too; its rank has already logged it.
    if not multiprocessing.current_process().daemon:
        report(level, text)


def _ignored_flags() -> str:
    """The encoders called so far that sync although their config says that they do not."""
    group_syncs = length_sync.process.group_syncs
    encoders = [reference() for reference in group_syncs.by_encoder.keyrefs()] if group_syncs is not None else []
    syncing = (one for one in encoders if one is not None and getattr(one, "sync_max_audio_length", True))
    names = sorted({type(one).__name__ for one in syncing if _configured_flag(one) == "false"})
    said = "sync_max_audio_length is false in the config that it was made from, and not in force"
    return "".join(f"; {name}: {said}" for name in names)


def _configured_flag(encoder: torch.nn.Module) -> str:
    """`sync_max_audio_length` in the config that NeMo made the encoder from: "true", "false", "NOT SET", or "?"."""
    config: Any = vars(encoder).get("_cfg")
    try:
        value = config.get("sync_max_audio_length")
    except Exception:  # no config, or an interpolation in it that leads nowhere
        return "?"
    return "NOT SET" if value is None else str(value).lower()
