"""The log lines about patching, each once: what is patched, with which settings, what is not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import torch

from nemo_patches.patching import admission
from nemo_patches.patching.imported import find_overrides, nothing_to_bound
from nemo_patches.patching.targets import TARGETS, Target
from nemo_patches.sync import length_sync
from nemo_patches.sync.encoder_flag import FLAG, flag_in_config
from nemo_patches.sync.encoder_rounds import listeners, nobody
from nemo_patches.sync.own_syncs import say as say_own_syncs
from nemo_patches.sync.rank_log import rank_and_size
from nemo_patches.sync.rank_log import report_of_rank as say

NOT_INHERITED = "a process that this one spawns must call apply() too"


class StartLines:
    """Of this process."""

    def __init__(self, patched: Collection[Target]) -> None:
        """patched: may change."""
        self._patched = patched
        # By apply() only: processes that this one spawns have no import hook.
        self.by_hand = False
        self._said_misspelt = False
        self._said_for_all = False

    def begin(self) -> None:
        listeners.all_announced = self.all_announced
        self.misspelt()
        version = admission.nemo_version()
        how = admission.how_unknown(version)
        if rank_and_size()[0] == 0 and how:
            from nemo_patches.patching import released_source

            say(
                released_source.compare(version, admission.SUPPORTED, how),
                logging.WARNING,
            )

    def end(self) -> None:
        listeners.all_announced = nobody

    def misspelt(self) -> None:
        if not self._said_misspelt:
            self._said_misspelt = True
            for sentence in admission.misspelt():
                say(sentence, logging.WARNING)

    def collection_complete(
        self,
        skipped: Mapping[Target, str],
        left: Mapping[Target, str],
    ) -> None:
        """skipped: what is not patched, and why; left: of these, what has no reduce of stock's."""
        if self._patched or not left:
            self.say_patched([target for target in TARGETS if target in self._patched])
        for reason in dict.fromkeys(left.values()):
            owners = ", ".join(
                target.owner for target in left if left[target] == reason
            )
            say(f"left as it is: {owners}: {reason}; stall reports watch the job")
        say_own_syncs(find_overrides(self._patched).values())
        for target, reason in skipped.items():
            say(f"not patched: {target}: {reason}", logging.DEBUG)
        say(f"settings: {length_sync.current()}", logging.DEBUG)

    def say_patched(self, targets: Iterable[Target]) -> None:
        # Otherwise rank 0 logs it for all, at their first encoder calls.
        if rank_and_size()[1] == 1:
            say(
                f"patched {self._what(targets)}"
                + (f"; {NOT_INHERITED}" if self.by_hand else "")
            )

    def all_announced(self, size: int, differences: tuple[str, ...]) -> bool:
        """On the stall monitor's thread. Once, and where ranks differ: a new process group has the
        same ranks, or is said to lack some.
        """
        level = logging.WARNING if differences else logging.INFO
        if not self._patched and nothing_to_bound():
            for text in differences:
                say(text, level)
        elif differences or not self._said_for_all:
            self._said_for_all = True
            patched = (target for target in TARGETS if target in self._patched)
            differing = "".join(f"; {text}" for text in differences)
            what = f"{self._what(patched)}{_ignored_flags()}{differing}"
            say(f"patched on all {size} ranks: {what}", level)
            # Made since, where a class of theirs keeps ours from being asked.
            say_own_syncs(find_overrides(self._patched).values())
        return True

    def _what(self, targets: Iterable[Target]) -> str:
        names = ", ".join(target.owner for target in targets) or "nothing yet"
        versions = f"nemo {admission.nemo_version()}, torch {torch.__version__}"
        return f"{names} ({versions}; {length_sync.current().short()})"


def _ignored_flags() -> str:
    """The encoders called so far that sync although their config says that they do not."""
    group_syncs = length_sync.process.group_syncs
    if group_syncs is None:
        return ""
    encoders = [reference() for reference in group_syncs.by_encoder.keyrefs()]
    syncing = (one for one in encoders if one is not None and vars(one).get(FLAG, True))
    names = sorted(
        {type(one).__name__ for one in syncing if flag_in_config(one) == "False"}
    )
    said = f"{FLAG} is false in the config that it was made from, and not in force"
    return "".join(f"; {name}: {said}" for name in names)
