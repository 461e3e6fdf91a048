"""Makes every buffer that has grown privately the registered one, as stock NeMo would have it: for revert()."""

from __future__ import annotations

import copyreg
import gc

import torch

from nemo_patches.sync.encoder_methods import growth, reduce_as_registered


def give_back_all() -> None:
    if not growth.happened:
        return
    # Copies of an encoder were never seen by us; only the collector knows them all.
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):
            for name in growth.names:
                if name in thing.__dict__ and name in thing._buffers:
                    thing._buffers[name] = thing.__dict__.pop(name)
    for module in list(growth.unregistered):
        for name in growth.names:
            if name in module.__dict__:
                module.register_buffer(name, module.__dict__.pop(name), persistent=False)
    growth.unregistered.clear()
    for owner in [owner for owner, reduce in copyreg.dispatch_table.items() if reduce is reduce_as_registered]:
        del copyreg.dispatch_table[owner]
    growth.happened = False
