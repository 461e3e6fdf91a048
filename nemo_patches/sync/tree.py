"""The side channel's tree: this rank's place in it, found through the job's store, and its connections."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import resource
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .keys import DOOR, HOSTS, PLACE, ROOT
from .safe_text import safe

FAN_OUT = 16  # children of a rank, at most
_HELLO = struct.Struct("<16sq")  # token, rank
_HELLO_S = 0.005
_MESSAGE = struct.Struct("<8sqq")  # key, number, value
_CONNECT_S, _SILENT_S, BACKLOG = 2.0, 5, 1024  # of visitors that wait to be let in
_SIOCGIFADDR = 0x8915  # Linux: asks for an interface's address


class Connection:
    """A socket to a child or to the parent. It never blocks."""

    def __init__(self, own: socket.socket, rank: int) -> None:
        self.socket, self.rank, self._received = own, rank, b""
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, key: bytes, number: int, value: int) -> None:
        """Never more than a socket takes: in each direction a key has one message under way, and then its answer."""
        with contextlib.suppress(OSError):  # lost: `receive` sees it
            self.socket.send(_MESSAGE.pack(key, number, value))

    def receive(self) -> list[tuple[Any, ...]] | None:
        """The messages that have come; None where the connection is lost."""
        try:
            data = self.socket.recv(1 << 14)
        except OSError as error:
            return [] if isinstance(error, BlockingIOError) else None
        everything = self._received + data
        whole = len(everything) // _MESSAGE.size * _MESSAGE.size
        self._received = everything[whole:]
        return list(_MESSAGE.iter_unpack(everything[:whole])) if data else None


class Place:
    """Where this rank is in the tree. Nothing here waits for another rank. All raise OSError and the store's errors."""

    def __init__(self, server: tuple[str, int] | None, rank: int, size: int) -> None:
        """server: the store's, if it has one."""
        self.parent, self.children, self.is_known = -1, frozenset[int](), False  # parent -1: rank 0 has none
        self._server, self._rank, self._hosts, self._attempt = server, rank, [rank] * size, -1
        self.problem = self._address = self._store_address = ""  # why there is no tree; this host's, and the store's

    def find(self, store: Any, attempt: int) -> bool:
        """Whether the tree is known, as it is once every rank has said where it is.

        Ranks say so once rank 0 has come: what was left before that may be of processes that have died since.
        """
        if attempt != self._attempt:
            if self._rank > 0 and not store.check([ROOT]):
                return False
            try:
                self.problem, (self._address, self._store_address) = "", here_and_store(self._server)
            except ValueError as error:
                self.problem = f"rank {self._rank} cannot take part: {error}"
            store.set(PLACE.format(rank=self._rank), json.dumps([socket.gethostname(), self.problem]))
            store.set(ROOT, "")
            self._attempt = attempt
        if self._rank == 0 and store.check(keys := [PLACE.format(rank=rank) for rank in range(len(self._hosts))]):
            hosts, problems = zip(*map(json.loads, store.multi_get(keys)), strict=True)
            store.set(HOSTS, json.dumps([[hosts.index(host) for host in hosts], max(problems)]))
        # Of another size: an earlier attempt's, which had no such rank.
        if store.check([HOSTS]) and len((told := json.loads(store.get(HOSTS)))[0]) == len(self._hosts):
            self._hosts, self.problem = told[0], safe(told[1])
            found = parents(self._hosts, FAN_OUT)
            self.children = frozenset(rank for rank, parent in enumerate(found) if parent == self._rank)
            self.parent, self.is_known = found[self._rank], True
        return self.is_known

    def listen(self, store: Any, token: bytes) -> socket.socket:
        """A port for the children, on this host's address; they find it, and the token, in the store."""
        address = "" if self._is_loopback_apart(self._address, self.children) else self._address
        listener = listening(address, self._address)
        store.set(DOOR.format(rank=self._rank), json.dumps([self._address, listener.getsockname()[1], token.hex()]))
        return listener

    def admit(self, listener: socket.socket, token: bytes, missing: frozenset[int]) -> Connection | None:
        """A missing child that knows the token; everybody else is dropped at once. OSError: there are no files left."""
        with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError, struct.error):
            visitor, _ = listener.accept()
            visitor.settimeout(_HELLO_S)  # said already, where the kernel holds back who says nothing
            said, rank = _HELLO.unpack(visitor.recv(_HELLO.size))
            if hmac.compare_digest(said, token) and rank in missing:
                return Connection(visitor, rank)
        return None

    def knock(self, store: Any) -> Connection | None:
        """A connection to the parent, which has yet to let this rank in; None: it does not listen yet."""
        if not store.check([door := DOOR.format(rank=self.parent)]):
            return None
        address, port, token = json.loads(store.get(door))
        if self._is_loopback_apart(address, [self.parent]):
            address = self._store_address
        own = socket.create_connection((address, port), _CONNECT_S)
        own.sendall(_HELLO.pack(bytes.fromhex(token), self._rank))
        return Connection(own, self.parent)

    def _is_loopback_apart(self, address: str, ranks: Iterable[int]) -> bool:
        """Whether these ranks need another address than this, a loopback one: the store's, which is on that host."""
        is_apart = any(self._hosts[rank] != self._hosts[self._rank] for rank in ranks)
        return is_apart and ipaddress.ip_address(address).is_loopback


def listening(address: str, like: str, port: int = 0) -> socket.socket:
    """A port that never blocks, at this address; where that is empty, at all of the family of the address `like`."""
    family = socket.AF_INET6 if ":" in like else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    if hasattr(socket, "TCP_DEFER_ACCEPT"):  # the kernel holds back who says nothing: such a visitor costs no file
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
    return listener


def parents(hosts: Sequence[int], fan_out: int) -> list[int]:
    """Each rank's parent, of at most `fan_out` children; -1 for rank 0. One connection leads out of each other host."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    within = min(max(map(len, members.values())) - 1, fan_out if len(members) == 1 else fan_out // 2)
    found, first = [-1] * len(hosts), [ranks[0] for ranks in members.values()]
    for ranks, children in ((first, fan_out - within), *((ranks, within) for ranks in members.values())):
        for index, rank in enumerate(ranks[1:]):
            found[rank] = ranks[index // children]
    return found


def here_and_store(server: tuple[str, int] | None) -> tuple[str, str]:
    """This host's address on the way to the store's server, and the server's (None: loopback). No packet is sent.

    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name the interface. Raises OSError; ValueError: Gloo's has no address.
    """
    family, _, _, _, way = socket.getaddrinfo(*server or ("127.0.0.1", 1), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(way)
        here, store = str(probe.getsockname()[0]), str(probe.getpeername()[0])
    gloo, nccl = (os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    for interface in filter(None, f"{gloo},{nccl.removeprefix('=').partition('^')[0]}".split(",")):  # ^: any but these
        if found := _address(interface):
            return found, store
    if gloo:
        raise ValueError(f"GLOO_SOCKET_IFNAME={gloo!r} has no address here")
    return here, store


def _address(interface: str) -> str:
    """Its IPv4 address, or else its global IPv6 address; empty without."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(reply[20:24])
    with contextlib.suppress(OSError):
        for digits, _, _, scope, _, name in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            if (name, scope) == (interface, "00"):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def make_room(files: int) -> None:
    """Raise the soft limit on open files, as far as the hard one allows, where it does not leave room for so many.

    Raises OSError where there is none left at all: torch would try for minutes, in silence, to reach the store.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # there is no /proc, or no file left to read it with
        soft = hard if soft - len(os.listdir("/proc/self/fd")) >= files else soft
    if soft != hard:
        wanted = soft + files if hard == resource.RLIM_INFINITY else min(soft + files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with socket.socket(), socket.socket():  # torch looks up the server's name beside it
        pass
