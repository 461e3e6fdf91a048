"""What `nemo_patches.status()` gives: the patches and the syncs of this process, and their text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_patches.patching import DISABLE_VARIABLE, admission, imported, parts
from nemo_patches.patching.admission import CANNOT_BE, OFF, ON
from nemo_patches.patching.monkeypatch import Patching
from nemo_patches.patching.start_lines import NOT_INHERITED
from nemo_patches.sync import length_sync
from nemo_patches.sync.length_sync import EncoderCounters
from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.text import named
from nemo_patches.watch import subscriber

if TYPE_CHECKING:
    from nemo_patches.judging.missing_rank import Stall


@dataclass(frozen=True)
class Skipped:
    """A target that is not patched, and why."""

    target: str
    reason: str


@dataclass(frozen=True)
class Status:
    """What nemo_patches does in this process. Prints well.

    state: "on", "off here" or "cannot be". why: for a person, with how to switch it on.
    trace_file: the file that is being written, or why there is none; empty without a trace.
    unannounced: ranks that show no sign of nemo_patches: not patched, or not started.
    stalls: encoder calls that not every rank has come to, with the missing ranks; or a job without
    encoder calls.
    own_syncs: a sentence for each class that overrides a bounded length sync.
    """

    nemo: str
    torch: str
    patched: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    settings: Settings
    encoders: tuple[EncoderCounters, ...]
    unannounced: tuple[int, ...]
    stalls: tuple[Stall, ...]
    own_syncs: tuple[str, ...] = ()
    trace_file: str = ""
    state: str = "on"
    why: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.state}: {self.why}",
            f"nemo {self.nemo}, torch {self.torch}",
            f"settings: {self.settings}",
            *([f"trace: {self.trace_file}"] if self.trace_file else []),
            "patched: " + (", ".join(self.patched) or "nothing"),
            *(
                f"skipped: {skipped.target}: {skipped.reason}"
                for skipped in self.skipped
            ),
            *self.own_syncs,
            *map(_encoder_line, self.encoders),
        ]
        if self.unannounced:
            lines.append(f"not patched, or not started: {named(self.unannounced)}")
        return "\n".join((*lines, *map(str, self.stalls)))


def status_of(patching: Patching, hook_installed: bool) -> Status:
    """hook_installed: whether the import hook is in force in this process."""
    try:
        nemo = admission.nemo_version()
    except ModuleNotFoundError:
        nemo = "not installed"
    settings = length_sync.current()
    patched = list(patching.patched)
    among = parts.LEFT if patching.in_force else ()
    for part in parts.switched_on(settings, among):
        patched += filter(patching.replacements.holds, part.targets)
    state, why = _state(patching, nemo, hook_installed, len(patched))
    overridden = imported.find_overrides(patching.patched)
    if overridden:
        why = f"{why}; overridden by {', '.join(overridden)}"
    return Status(
        nemo=nemo,
        torch=torch.__version__,
        patched=tuple(map(str, patched)),
        skipped=tuple(
            Skipped(str(target), reason) for target, reason in patching.skipped.items()
        ),
        settings=settings,
        encoders=length_sync.counters(),
        unannounced=subscriber.unannounced(),
        stalls=subscriber.stalls(),
        own_syncs=tuple(overridden.values()),
        trace_file=parts.trace_file(),
        state=state,
        why=why,
    )


def _state(
    patching: Patching, nemo: str, hook_installed: bool, patched: int
) -> tuple[str, str]:
    """Whether this process is patched, in one of three words, and why."""
    if patching.patched:
        return ON, f"{patched} of NeMo's methods patched"
    if patching.in_force:
        left = dict.fromkeys(imported.nothing_to_bound().values())
        return ON, f"{', '.join(left)}; the stall monitor is on"
    if nemo == "not installed":
        return CANNOT_BE, f"NeMo is not installed for {sys.executable}"
    try:
        disabled = admission.is_disabled()
        admission.require_supported(nemo)
    except (SettingsError, admission.UnsupportedNeMo) as error:
        return CANNOT_BE, str(error)
    if disabled:
        text = "unset it, and apply() or `nemo-patches run` can switch it on"
        return OFF, f"{DISABLE_VARIABLE}=1; {text}"
    if patching.refused:
        return CANNOT_BE, patching.refused
    if patching.follows_imports and hook_installed:
        text = "NeMo's encoders are patched when they are imported, which has not happened yet"
        return ON, text
    return (
        OFF,
        f"nemo_patches.apply() or `nemo-patches run` switches it on; {NOT_INHERITED}",
    )


def _encoder_line(counters: EncoderCounters) -> str:
    text = (
        f"{counters.encoder}: {counters.calls} calls, {counters.rounds} rounds, "
        f"{counters.fallbacks} fallbacks, {counters.timeouts} timeouts, "
        f"waited {counters.waited.total_seconds():.3f} s"
    )
    if counters.ended:
        text += f"; ended: {counters.ended}"
    return text
