"""The `forward` of the patched classes while a trace is on. Imported with that setting."""

from __future__ import annotations

from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import TARGETS
from nemo_patches.tracing.recorded_forward import recorded

_FORWARD = "forward"
_SYNCS = {target.method for target in TARGETS}


def record(replacements: Replacements) -> None:
    """Record the `forward` of every patched class, unless it is recorded already."""
    with_forward = {made.owner for made in replacements.made if made.name == _FORWARD}
    patched = [made.owner for made in replacements.made if made.name in _SYNCS]
    for owner in patched:
        if owner not in with_forward:
            # Not by inspect.getattr_static, which raises for a class in Python 3.13.0.
            original = next(
                vars(base)[_FORWARD] for base in owner.__mro__ if _FORWARD in vars(base)
            )
            own_name, forward = recorded(original)
            replacements.put(owner, own_name, original)
            replacements.put(owner, _FORWARD, forward)


def restore(replacements: Replacements) -> None:
    for forward in [made for made in replacements.made if made.name == _FORWARD]:
        place = replacements.made.index(forward)
        # Under the other name, which ours needs if it stays.
        original = replacements.made[place - 1]
        del replacements.made[place - 1 : place + 1]
        if forward.undo():
            original.undo()
