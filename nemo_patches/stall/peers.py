"""Heartbeats asked from the ranks themselves, each over a connection of its own: the way around a store that fails.

Each rank's stall monitor listens on a port, which the ranks learn at the roll call. Who connects is sent the heartbeat;
nothing that it sends is read.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .heartbeats import LONGEST, LONGEST_REPORT, Beat, decode, encode
from .rank_text import safe

_AT_ONCE = 256  # connections of one rank: it may have few files left
_SLICE = 0.05  # seconds between two looks whether the answers are still wanted
_BACKLOG = 1024


class Peer(NamedTuple):
    """Where a rank's process is, and where it listens. The address is empty where it does not."""

    host: str
    pid: int
    address: str
    port: int


class Listener:
    """This rank's port. Raises OSError where there can be none. `answer` is called again and again; it never waits."""

    def __init__(self, server: tuple[str, int]) -> None:
        """server: the store's. The address that this host has on the way there is for the others; no packet is sent."""
        family, _, _, _, address = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            self.address, self._store_address = str(way.getsockname()[0]), str(way.getpeername()[0])
        both = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else family, backlog=_BACKLOG, dualstack_ipv6=both
        )
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def answer(self, beat: Callable[[], Beat]) -> None:
        data = b""
        with contextlib.suppress(OSError):  # nobody asks, or closed
            while True:
                client, _ = self._socket.accept()
                with client, contextlib.suppress(OSError):
                    data = data or encode(beat())
                    client.setblocking(False)
                    client.send(data)  # of a size that every socket's buffer takes

    def from_here(self, peer: Peer) -> Peer:
        """With the address that it has from this host: who reaches the store at a loopback address is beside it."""
        beside = peer.address and ipaddress.ip_address(peer.address).is_loopback
        return peer._replace(address=self._store_address) if beside else peer

    def close(self) -> None:
        self._socket.close()


def encode_peers(peers: Mapping[int, Peer]) -> str:
    return json.dumps({str(rank): peer for rank, peer in peers.items()})


def decode_peers(data: bytes, size: int) -> dict[int, Peer]:
    """What `encode_peers` made a text of, for `size` ranks in all; empty for another text."""
    try:
        content = json.loads(data) if len(data) <= LONGEST_REPORT else {}
        found = {int(rank): _peer(*peer) for rank, peer in content.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return {rank: peer for rank, peer in found.items() if 0 <= rank < size}


def _peer(host: str, pid: int, address: str, port: int) -> Peer:
    return Peer(safe(host), int(pid), str(ipaddress.ip_address(address)) if address else "", int(port) & 0xFFFF)


def ask(peers: Mapping[int, Peer], patience: float, cancelled: Callable[[], bool]) -> dict[int, Beat]:
    """The present heartbeats of those that answer, by rank; each is given so many seconds."""
    found: dict[int, Beat] = {}
    ranks = sorted(peers)
    for start in range(0, len(ranks), _AT_ONCE):
        found |= _ask({rank: peers[rank] for rank in ranks[start : start + _AT_ONCE]}, patience, cancelled)
    return found


def _ask(peers: Mapping[int, Peer], patience: float, cancelled: Callable[[], bool]) -> dict[int, Beat]:
    found: dict[int, Beat] = {}
    end = time.monotonic() + patience
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as pending:
        for rank, peer in peers.items():
            with contextlib.suppress(OSError):  # no more files: as one that does not answer
                family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
                client = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                client.setblocking(False)
                client.connect_ex((peer.address, peer.port))
                pending.register(client, selectors.EVENT_READ, (rank, client, bytearray()))
        while pending.get_map() and not cancelled() and (left := end - time.monotonic()) > 0:
            for key, _ in pending.select(min(left, _SLICE)):
                rank, client, data = key.data
                more = b""
                with contextlib.suppress(OSError):  # refused, or unreachable
                    more = client.recv(LONGEST)
                data += more
                if more and len(data) <= LONGEST:
                    continue
                pending.unregister(client)
                beat = decode(bytes(data))
                if beat is not None and beat.rank == rank:
                    found[rank] = beat
    return found
