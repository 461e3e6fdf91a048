"""The job's store: connections of our own to it, and every key that nemo_patches has in it."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ctypes
import weakref

import torch.distributed as dist

# One bit for each rank in a number that ranks add to: every kind of store can add.
RANKS_PER_PRESENCE_KEY = 62

# Keys of the roll call.
ANNOUNCED = "announced"  # how many ranks have announced themselves
PEERS = "peers"  # where each rank's process is, and where it listens; of rank 0, once all have announced themselves
# Keys below an encoder's own prefix, for connecting its group.
ARRIVED = "arrived"  # how many ranks have come
FAILED = "failed"  # why a rank cannot take part


def group_prefix(restart: str, generation: int) -> str:
    """Above all keys of one process group. torchrun keeps one store over restarts; a script may use one for several."""
    return f"nemo_patches/{restart}/{generation}"


def presence_key(rank: int) -> str:
    """The number with a bit for each rank that has announced itself, for this rank and its neighbours."""
    return f"present/{rank // RANKS_PER_PRESENCE_KEY}"


def heartbeat_key(rank: int) -> str:
    return f"beat/{rank}"


def query_topic(encoder_key: str, round_number: int, repeat: int, attempt: int) -> str:
    """Under which ranks agree on who finds out who is missing from a round, and where that rank leaves it."""
    return f"stall/{encoder_key}/{round_number}/{repeat}.{attempt}"


def waited_for_key(rank: int) -> str:
    """What the ranks that waited for this rank have left for it."""
    return f"waited_for/{rank}"


def figures_key(rank: int) -> str:
    """A rank's figures for Lightning's loggers."""
    return f"figures/{rank}"


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
        """At exit: a thread that still waits for the store must not return into a dying interpreter.

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
    """A connection to the same store that no one else uses; the store itself where its kind has none.

    A blocking request holds its client's lock: on the default store's client it would hold up c10d's own requests.
    """
    if hasattr(store, "clone"):  # newer torch; keeps the prefixes
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()  # type: ignore[no-any-return]
    inner = _innermost(store)
    if isinstance(inner, dist.TCPStore):
        return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False)
    return store
