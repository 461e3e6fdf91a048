"""Makes every buffer that has grown privately the registered one, as stock NeMo would have it: for revert()."""

from __future__ import annotations

import copyreg
import gc

import torch

from nemo_patches.sync import encoder_methods
from nemo_patches.sync.encoder_methods import METHODS, PRIVATE, growth, reduce_as_registered


def give_back_all() -> None:
    if not growth.names:
        return
    # Copies of an encoder were never seen by us; only the collector knows them all.
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module) and type(thing) in growth.names:  # a scripted one has other buffers
            thing._buffers.update(thing.__dict__.pop(PRIVATE, {}))
    for owner, names in reversed(growth.names.items()):
        if copyreg.dispatch_table.get(owner) is reduce_as_registered:
            del copyreg.dispatch_table[owner]
        for name in ("_apply", *METHODS):
            _restore(owner, name)
        for name in names:
            if isinstance(vars(owner).get(name), property):
                delattr(owner, name)
    growth.names.clear()


def _restore(owner: type, name: str) -> None:
    """Undo what encoder_methods has put into a class. Inside somebody's wrapper it stays, and finds nothing private."""
    ours = vars(owner).get(name)
    if getattr(ours, "__globals__", None) is vars(encoder_methods):
        original = ours.__wrapped__  # type: ignore[union-attr]
        delattr(owner, name)
        if getattr(owner, name) is not original:  # else it was inherited
            setattr(owner, name, original)
