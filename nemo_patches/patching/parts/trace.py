"""The trace of this process, and the `forward` of the patched classes while it is on."""

from __future__ import annotations

from nemo_patches.patching.parts import InForce, Part
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import TARGETS
from nemo_patches.sync import length_sync
from nemo_patches.sync.settings import Settings
from nemo_patches.tracing.recorded_forward import record_forward
from nemo_patches.tracing.recorder import tracing

_FORWARD = "forward"
_SYNCS = {target.method for target in TARGETS}


def _begin(replacements: Replacements, _: InForce) -> None:
    """Begin or go on with the trace; record every patched class, unless it is already."""
    tracing.use(length_sync.current())
    for owner in [made.owner for made in replacements.made if made.name in _SYNCS]:
        if not replacements.has(owner, _FORWARD):
            original = next(
                vars(base)[_FORWARD] for base in owner.__mro__ if _FORWARD in vars(base)
            )
            own_name, forward = record_forward(original)
            replacements.put(owner, own_name, original)
            replacements.put(owner, _FORWARD, forward)


def _end(replacements: Replacements) -> None:
    tracing.stop()
    for forward in [made for made in replacements.made if made.name == _FORWARD]:
        place = replacements.made.index(forward)
        # Under the other name, which ours needs if it stays.
        original = replacements.made[place - 1]
        del replacements.made[place - 1 : place + 1]
        if forward.undo():
            original.undo()


def _callback(_: Settings) -> object:
    from nemo_patches.tracing.trainer_exceptions import TrainerExceptions

    return TrainerExceptions()


PART = Part(setting="trace", begin=_begin, end=_end, callback=_callback)
