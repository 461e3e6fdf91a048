"""The job's store: every key that nemo_patches has in it, and connections of our own to it."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ctypes
import weakref

import torch.distributed as dist

# Above all other keys of a process group: torchrun keeps one store over restarts; a script may use one for several.
PREFIX = "nemo_patches/{restart}/{generation}"
ARRIVED = "arrived"  # how many ranks have come; below an encoder's own prefix, for connecting its group
FAILED = "failed"  # why a rank cannot take part; there, too
# Of the roll call and of stall reports.
ANNOUNCED = "announced"  # how many ranks have announced themselves
PRESENT = "present/{block}"  # one bit for each rank of a block, in a number that ranks add to: every store can add
RANKS_PER_BLOCK = 62
PEERS = "peers"  # where each rank's process is, and where it listens: rank 0's, once all have announced themselves
HEARTBEAT = "beat/{rank}"
QUERY = "stall/{encoder}/{round}/{repeat}.{attempt}"  # who finds out who is missing, and what that rank has found
WAITED_FOR = "waited_for/{rank}"  # what the ranks that waited for this one have left for it
FIGURES = "figures/{rank}"  # for the Lightning callback


class JobStore:
    """The store that all ranks of a process group meet at. c10d's own client of it is never used for a request."""

    def __init__(self, default_store: dist.Store, prefix: str) -> None:
        # Weak: a strong reference would keep rank 0's server, and its port, after destroy_process_group.
        self._default_store = weakref.ref(default_store)
        self._prefix = prefix
        inner = _innermost(default_store)
        self.is_file = isinstance(inner, dist.FileStore)
        self.server = (inner.host, inner.port) if isinstance(inner, dist.TCPStore) else None

    def connect(self) -> dist.Store:
        """A new connection, below this process group's prefix. May block; RuntimeError where the group is gone."""
        default_store = self._default_store()
        if default_store is None:
            raise RuntimeError("the process group was destroyed")
        return dist.PrefixStore(self._prefix, _own_connection(default_store))

    def outlive_interpreter(self) -> None:
        """At exit, where a thread still waits for the store: it must not return into a dying interpreter.

        So the store's server, where this process has it, must not end before the process does.
        """
        leak(self._default_store())


def leak(thing: object) -> None:
    """One reference too many: the destructor, which would wait for a pending round, never runs (docs/design.md)."""
    if thing is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _innermost(store: dist.Store) -> dist.Store:
    """The store itself, without the prefixes around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _own_connection(store: dist.Store) -> dist.Store:
    """One that no one else uses, for a blocking request holds its client's lock; else the store itself."""
    if hasattr(store, "clone"):  # newer torch; keeps the prefixes
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()  # type: ignore[no-any-return]
    inner = _innermost(store)
    if isinstance(inner, dist.TCPStore):
        return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False)
    return store
