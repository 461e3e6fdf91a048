"""Heartbeats asked from the peers themselves, each over a connection of its own: the way around a store that fails.

Each rank's stall monitor listens on a port, which the ranks learn at the roll call. Who connects is sent the heartbeat;
nothing that it sends is read.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from ..sync.tree import here_and_store
from .heartbeat import Heartbeat
from .wire import LONGEST_HEARTBEAT, Peer, decode_heartbeat, encode_heartbeat

_CONNECTIONS_AT_ONCE = 256  # of one rank: it may have few files left
_SLICE_S = 0.05  # between two looks whether the answers are still wanted
_BACKLOG = 1024  # connections


class Listener:
    """This rank's port. `answer` is called again and again; it never waits."""

    def __init__(self, server: tuple[str, int]) -> None:
        """server: the store's. Peers get this host's address as of `here_and_store`.

        Raises OSError where there can be no port.
        """
        self.address, self._store_address = here_and_store(server)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else family, backlog=_BACKLOG, dualstack_ipv6=both
        )
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def answer(self, make_heartbeat: Callable[[], Heartbeat]) -> None:
        """Send the heartbeat to everybody who has connected."""
        data = b""
        with contextlib.suppress(OSError):  # nobody asks, or closed
            while True:
                client, _ = self._socket.accept()
                with client, contextlib.suppress(OSError):
                    data = data or encode_heartbeat(make_heartbeat())
                    client.setblocking(False)
                    client.send(data)  # of a size that every socket's buffer takes

    def from_here(self, peer: Peer) -> Peer:
        """A peer with a loopback address runs on the store's host: use the store's address."""
        on_stores_host = peer.address and ipaddress.ip_address(peer.address).is_loopback
        return peer._replace(address=self._store_address) if on_stores_host else peer

    def close(self) -> None:
        self._socket.close()


def ask(peers: Mapping[int, Peer], patience_s: float, cancelled: Callable[[], bool]) -> dict[int, Heartbeat]:
    """The present heartbeats of those that answer, by rank; each is given `patience_s`."""
    heartbeats: dict[int, Heartbeat] = {}
    ranks = sorted(peers)
    for start in range(0, len(ranks), _CONNECTIONS_AT_ONCE):
        some = {rank: peers[rank] for rank in ranks[start : start + _CONNECTIONS_AT_ONCE]}
        heartbeats |= _ask(some, patience_s, cancelled)
    return heartbeats


def _ask(peers: Mapping[int, Peer], patience_s: float, cancelled: Callable[[], bool]) -> dict[int, Heartbeat]:
    heartbeats: dict[int, Heartbeat] = {}
    end = time.monotonic() + patience_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as pending:
        for rank, peer in peers.items():
            with contextlib.suppress(OSError):  # no more files: as one that does not answer
                family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
                client = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                client.setblocking(False)
                client.connect_ex((peer.address, peer.port))
                pending.register(client, selectors.EVENT_READ, (rank, client, bytearray()))
        while pending.get_map() and not cancelled() and (left := end - time.monotonic()) > 0:
            for key, _ in pending.select(min(left, _SLICE_S)):
                rank, client, data = key.data
                more = b""
                with contextlib.suppress(OSError):  # refused, or unreachable
                    more = client.recv(LONGEST_HEARTBEAT)
                data += more
                if more and len(data) <= LONGEST_HEARTBEAT:
                    continue
                pending.unregister(client)
                heartbeat = decode_heartbeat(bytes(data))
                if heartbeat is not None and heartbeat.rank == rank:
                    heartbeats[rank] = heartbeat
    return heartbeats
