"""This rank's place in the tree of the side channel: found through the job's store, host by host."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .keys import DOOR, HOSTS, PLACE

FAN_OUT = 16  # children of a rank, at most
_CONNECT_S, _SILENT_S = 2.0, 5
_SIOCGIFADDR, _LINK_LOCAL = 0x8915, "20"  # Linux: asks for an interface's address; a scope in /proc/net/if_inet6


class Place:
    """Where this rank is in the tree. Nothing here waits for another rank; everything raises the store's errors."""

    def __init__(self, server: tuple[str, int] | None, rank: int, size: int) -> None:
        """server: the store's, if it has one."""
        self.is_known = False
        self.parent, self.children, self.problem = -1, frozenset[int](), ""  # parent -1: of rank 0
        self._rank, self._size, self._hosts, self._server = rank, size, [0] * size, server

    def find(self, store: Any) -> bool:
        """Whether the tree is known, or else why there is none (`problem`): once every rank has said where it is."""
        places = [PLACE.format(rank=rank) for rank in range(self._size)]
        try:
            here_and_store(self._server)
            problem = ""
        except OSError as error:
            problem = f"rank {self._rank} cannot take part: {error}"
        store.set(places[self._rank], json.dumps([socket.gethostname(), problem]))
        if self._rank == 0 and store.check(places):
            hosts, problems = zip(*map(json.loads, store.multi_get(places)), strict=True)
            store.set(HOSTS, json.dumps([[hosts.index(host) for host in hosts], max(problems)]))
        if store.check([HOSTS]):
            self._hosts, self.problem = json.loads(store.get(HOSTS))
            found = parents(self._hosts)
            self.parent = found[self._rank]
            self.children = frozenset(rank for rank, parent in enumerate(found) if parent == self._rank)
            self.is_known = True  # last: the training thread may be looking
        return self.is_known

    def listen(self, store: Any, token: bytes) -> socket.socket:
        """A port for the children, in this host's interface on the way to the store."""
        address, _ = here_and_store(self._server)
        # From other hosts a loopback address cannot be reached; they know the host by the store's address.
        is_alone = all(self._hosts[child] == self._hosts[self._rank] for child in self.children)
        bound = address if is_alone or not _is_loopback(address) else ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((bound, 0), family=family, backlog=1024)
        listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # the kernel holds back who says nothing: such a visitor costs no file
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        door = [address, listener.getsockname()[1], token.hex()]
        store.set(DOOR.format(rank=self._rank), json.dumps(door))
        return listener

    def knock(self, store: Any) -> tuple[socket.socket, bytes] | None:
        """A connection to the parent, and the token that it wants to hear; None: it does not listen yet."""
        door = DOOR.format(rank=self.parent)
        if not store.check([door]):
            return None
        address, port, token = json.loads(store.get(door))
        if _is_loopback(address) and self._hosts[self.parent] != self._hosts[self._rank]:
            address = here_and_store(self._server)[1]
        return socket.create_connection((address, port), _CONNECT_S), bytes.fromhex(token)


def parents(hosts: Sequence[int], fan_out: int = FAN_OUT) -> list[int]:
    """Each rank's parent, -1 for rank 0. hosts: by rank. One connection leads out of each host but rank 0's."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    most = max(map(len, members.values())) - 1
    within = min(most, fan_out if len(members) == 1 else fan_out // 2)
    found = [-1] * len(hosts)
    first_ranks = [ranks[0] for ranks in members.values()]
    for ranks, children in ((first_ranks, fan_out - within), *((ranks, within) for ranks in members.values())):
        for index, rank in enumerate(ranks[1:]):
            found[rank] = ranks[index // children]
    return found


def here_and_store(server: tuple[str, int] | None) -> tuple[str, str]:
    """This host's address on the way to the store's server, and the server's (None: loopback). No packet is sent.

    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name the interface. Raises OSError where it has no address.
    """
    family, _, _, _, way = socket.getaddrinfo(*server or ("127.0.0.1", 1), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(way)
        here, store = str(probe.getsockname()[0]), str(probe.getpeername()[0])
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "") or "^"  # beginnings of names; "^": all but these
    beginnings = tuple(filter(None, nccl.removeprefix("=").split(",")))
    interfaces = [name for _, name in socket.if_nameindex()]
    named = [name for name in interfaces if (name in gloo.split(",") if gloo else name.startswith(beginnings))]
    found = [address for name in named for address in _addresses(name)]
    if gloo and not found:
        raise OSError(f"GLOO_SOCKET_IFNAME={gloo!r} has no address here; interfaces: {', '.join(interfaces)}")
    return min(found or [here], key=lambda address: (":" in address) != (":" in here)), store


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):
        for digits, _, _, scope, _, name in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            if name == interface and scope != _LINK_LOCAL:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
