"""Heartbeats asked from the peers themselves, each over a connection of its own: the way around a store that fails.

Each rank's stall monitor listens on a port, which the ranks learn at the roll call together with the job's token. Who
says the token is sent the heartbeat; everybody else is told nothing, and dropped.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from ..channel.safe_text import safe
from ..channel.tree import BACKLOG, here_and_store, listening
from .heartbeat import Heartbeat
from .wire import LONGEST_HEARTBEAT, TOKEN_BYTES, Peer, decode_heartbeat, encode_heartbeat

_CONNECTIONS_AT_ONCE = 256  # of one rank: it may have few files left
_SLICE_S = 0.05  # between two looks whether the answers are still wanted
_MOST_SILENT = 16  # visitors that have said nothing yet, from one look to the next


class Listener:
    """This rank's port. `answer` is called again and again, by one thread; it never waits."""

    def __init__(self, server: tuple[str, int]) -> None:
        """server: the store's. The port is on the interface on the way there, and on no other.

        Raises OSError or ValueError where there can be no port.
        """
        self.address, self._store_address = here_and_store(server)
        self._socket = listening(self.address, self.address)
        self.port = int(self._socket.getsockname()[1])
        self._host = safe(socket.gethostname())
        self._token = secrets.token_bytes(TOKEN_BYTES)  # nobody has it: before the roll call is complete, nobody asks
        self._too_narrow = False
        self._silent: list[socket.socket] = []

    def introduce(self, peers: Mapping[int, Peer], token: bytes) -> None:
        """The roll call is complete: who may ask, and by which token."""
        self._token = token
        # Ranks on other hosts cannot reach a loopback address: they ask at the store's, which is this host's then.
        self._too_narrow = _is_loopback(self.address) and any(peer.host != self._host for peer in peers.values())

    def answer(self, make_heartbeat: Callable[[], Heartbeat]) -> None:
        """Send the heartbeat to everybody who says the token. Who says nothing has until the next look."""
        if self._too_narrow:
            self._widen()
        heartbeat = functools.cache(lambda: encode_heartbeat(make_heartbeat()))
        silent, self._silent = self._silent, []
        for visitor in silent:
            with visitor:
                self._heed(visitor, heartbeat)
        with contextlib.suppress(OSError):  # nobody more, or closed, or no more files
            for _ in range(BACKLOG):
                visitor, _ = self._socket.accept()
                visitor.setblocking(False)
                if self._heed(visitor, heartbeat) or len(self._silent) == _MOST_SILENT:
                    visitor.close()
                else:
                    self._silent.append(visitor)

    def from_here(self, peer: Peer) -> Peer:
        """A peer on another host with a loopback address is on the store's host: use the store's address."""
        is_apart = peer.host != self._host and _is_loopback(peer.address)
        return peer._replace(address=self._store_address) if is_apart else peer

    def close(self) -> None:
        for own in (self._socket, *self._silent):
            own.close()

    def _heed(self, visitor: socket.socket, heartbeat: Callable[[], bytes]) -> bool:
        """False where it has said nothing yet."""
        try:
            if hmac.compare_digest(visitor.recv(TOKEN_BYTES), self._token):
                visitor.send(heartbeat())  # of a size that every socket's buffer takes
        except BlockingIOError:
            return False
        except OSError:  # it has gone
            pass
        return True

    def _widen(self) -> None:
        self._too_narrow = False
        self._socket.close()
        with contextlib.suppress(OSError):  # somebody else has the port: ranks on other hosts find this one silent
            self._socket = listening("", self.address, self.port)


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def ask(
    peers: Mapping[int, Peer], token: bytes, patience_s: float, cancelled: Callable[[], bool]
) -> dict[int, Heartbeat]:
    """The present heartbeats of those that answer, by rank; each is given `patience_s`.

    Raises OSError where this process has no files left: that is nobody else's silence.
    """
    heartbeats: dict[int, Heartbeat] = {}
    ranks = sorted(peers)
    for start in range(0, len(ranks), _CONNECTIONS_AT_ONCE):
        some = {rank: peers[rank] for rank in ranks[start : start + _CONNECTIONS_AT_ONCE]}
        heartbeats |= _ask(some, token, patience_s, cancelled)
    return heartbeats


def _ask(
    peers: Mapping[int, Peer], token: bytes, patience_s: float, cancelled: Callable[[], bool]
) -> dict[int, Heartbeat]:
    heartbeats: dict[int, Heartbeat] = {}
    end = time.monotonic() + patience_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as pending:
        for rank, peer in peers.items():
            family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
            client = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            client.setblocking(False)
            client.connect_ex((peer.address, peer.port))
            pending.register(client, selectors.EVENT_WRITE, (rank, client, bytearray()))
        while pending.get_map() and not cancelled() and (left := end - time.monotonic()) > 0:
            for key, events in pending.select(min(left, _SLICE_S)):
                rank, client, data = key.data
                more = b""
                with contextlib.suppress(OSError):  # refused, or unreachable
                    if events & selectors.EVENT_WRITE:  # connected
                        client.sendall(token)
                        pending.modify(client, selectors.EVENT_READ, key.data)
                        continue
                    more = client.recv(LONGEST_HEARTBEAT)
                data += more
                if more and len(data) <= LONGEST_HEARTBEAT:
                    continue
                pending.unregister(client)
                heartbeat = decode_heartbeat(bytes(data))
                if heartbeat is not None and heartbeat.rank == rank:
                    heartbeats[rank] = heartbeat
    return heartbeats
