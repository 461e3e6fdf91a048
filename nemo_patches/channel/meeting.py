"""Where the ranks of a process group meet, and the shape of their tree.

Rank 0 leaves its address in the job's store, and the others register with it. The store is used for
this one key, before there are any rounds; and for a note of each rank that cannot reach rank 0.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import contextlib
import ipaddress
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..text import safe
from .own_socket import Socket

try:
    import fcntl
    import resource
except (
    ModuleNotFoundError
):  # not Unix: no rank runs there, but `nemo-patches diagnose` reads files there
    pass

FAN_OUT = 16  # connections of a rank to those below it, at most
ROOT_KEY = "nemo_patches/root"
_NOTE_KEY = "nemo_patches/unreached/{rank}"
_FORMAT = 2
_BACKLOG = 1024
# The kernel holds back a client that says nothing for so long: it costs no file.
_SILENT_S = 5
_ASK_FOR_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
_LONGEST_TEXT = 256  # characters of a host's name, an address or a trouble


@dataclass(frozen=True)
class Member:
    """A rank, as all others know it. trouble: why it cannot take part."""

    host: str
    address: str
    port: int
    pid: int
    trouble: str = ""

    def to_json(self) -> list[Any]:
        return [self.host, self.address, self.port, self.pid, self.trouble]

    @classmethod
    def from_json(cls, told: Any) -> Member:
        """Raises ValueError if no rank of this format has sent it."""
        host, address, port, pid, trouble = told
        if [type(one) for one in told] != [str, str, int, int, str]:
            raise ValueError("not a member")
        longest = max(len(host), len(address), len(trouble))
        if longest > _LONGEST_TEXT or not 0 <= port < 1 << 16:
            raise ValueError("not a member")
        return cls(safe(host), address, port, pid, safe(trouble))

    def reached_from(self, here: Member, store_address: str) -> str:
        """Its address for a rank: another host's loopback address means the store's host."""
        if self.host != here.host and is_loopback(self.address):
            return store_address
        return self.address


def packed(members: Iterable[Member]) -> bytes:
    """All of a job. In columns, where ranks of one host repeat each other: some 8 bytes a rank."""
    columns = list(zip(*(member.to_json() for member in members), strict=True))
    return zlib.compress(json.dumps({"members": columns}).encode())


def leave_root(store: Any, root: Member) -> bytes:
    """As rank 0: returns a new token, so that no rank of another group is taken for ours."""
    token = secrets.token_bytes(16)
    store.set(ROOT_KEY, json.dumps([_FORMAT, token.hex(), root.to_json()]))
    return token


def find_root(store: Any) -> tuple[Member, bytes] | None:
    """Where rank 0 is, and the token; None: it has not come. Two requests, which wait for nobody.

    Raises ValueError if rank 0 has another format, and the store's errors.
    """
    if not store.check([ROOT_KEY]):
        return None
    told = json.loads(store.get(ROOT_KEY))
    if told[0] != _FORMAT:
        raise ValueError(
            f"rank 0 has another version of nemo_patches: format {told[0]!r}, here {_FORMAT}"
        )
    return Member.from_json(told[2]), bytes.fromhex(told[1])


def leave_note(store: Any, token: bytes, rank: int, member: Member) -> None:
    """As a rank that cannot reach rank 0, which its member's trouble says.

    Right after find_root(), when the store answers: a set waits only for room to send.
    """
    told = json.dumps([_FORMAT, token.hex(), member.to_json()])
    store.set(_NOTE_KEY.format(rank=rank), told)


def find_notes(store: Any, token: bytes, ranks: list[int]) -> dict[int, Member]:
    """By rank, the notes of this group's; others' may be there still. Raises the store's errors."""
    found = {}
    for rank in ranks:
        key = _NOTE_KEY.format(rank=rank)
        if store.check([key]):
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
                told = json.loads(store.get(key))
                if told[:2] == [_FORMAT, token.hex()]:
                    found[rank] = Member.from_json(told[2])
    return found


def end_requests(store: Any) -> None:
    """At exit: end a request now, in an error.

    It must not return into an interpreter that ends, where C++ aborts the process.
    """
    for one in _connections_to(port_of(store)):
        with contextlib.suppress(OSError):
            one.shutdown(_socket.SHUT_RDWR)


def _connections_to(port: int) -> Iterator[Socket]:
    """This process's to a port of any host, each as a copy that is closed after its turn."""
    for name in os.listdir("/proc/self/fd") if port else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with Socket(fileno=os.dup(int(name))) as one:
                is_tcp = one.family in (_socket.AF_INET, _socket.AF_INET6)
                if is_tcp and one.getpeername()[1] == port:
                    yield one


def port_of(store: Any) -> int:
    """The port of the store's server; 0 where it has none."""
    return _server_of(store)[1]


def _server_of(store: Any) -> tuple[str, int]:
    """Its host and port; loopback and 0 where it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return store.host, store.port
    return "127.0.0.1", 0


def own_addresses(store: Any) -> tuple[str, str]:
    """This host's address on the way to the store's server, and the server's. No packet is sent.

    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name the interface. Raises OSError, and ValueError
    where Gloo's interface has no address.
    """
    here, there = _way_to(*_server_of(store))
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl.startswith("^"):  # any but these
        nccl = ""
    for interface in f"{gloo},{nccl.removeprefix('=')}".split(","):
        address = _address_of(interface)
        if address:
            return address, there
    if gloo:
        raise ValueError(f"GLOO_SOCKET_IFNAME={gloo!r} has no address here")
    return here, there


def _way_to(host: str, port: int) -> tuple[str, str]:
    """This end's address and the other one's: of the store's own connection, where there is one.

    Then no name is resolved. Raises OSError.
    """
    for one in _connections_to(port):
        here, there = one.getsockname(), one.getpeername()
        if here[1] != port:  # else it is the server's end
            return _plain(here[0]), _plain(there[0])
    family, _, _, _, way = _socket.getaddrinfo(host, port or 1, 0, _socket.SOCK_DGRAM)[
        0
    ]
    with Socket(family, _socket.SOCK_DGRAM) as probe:
        probe.connect(way)
        return _plain(probe.getsockname()[0]), _plain(probe.getpeername()[0])


def _plain(address: str) -> str:
    """An IPv4 address as such, where a socket for both families has it."""
    return address.removeprefix("::ffff:") if "." in address else address


def _address_of(interface: str) -> str:
    """Its IPv4 address, or else its global IPv6 address; empty without."""
    if not interface:
        return ""
    request = struct.pack("256s", interface.encode())
    with (
        Socket(_socket.AF_INET, _socket.SOCK_DGRAM) as probe,
        contextlib.suppress(OSError),
    ):
        reply = fcntl.ioctl(probe.fileno(), _ASK_FOR_ADDRESS, request)
        return _socket.inet_ntoa(reply[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return _socket.inet_ntop(_socket.AF_INET6, bytes.fromhex(digits))
    return ""


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def listens_on_all(address: str, rank: int, size: int) -> bool:
    """Whether other hosts may come by another address than this host has for itself.

    To the store's host, a name that it resolves to its loopback address; to rank 0, the address of
    the store. Not where the user has named an interface, nor where all ranks run on this host.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    is_chosen = any(os.environ.get(name) for name in names)
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    may_be_reached = rank == 0 or is_loopback(address)
    return may_be_reached and not is_chosen and not is_one_host


def listen(address: str, on_all: bool) -> Socket:
    """A port at this address, or at all addresses, of both families if they are there."""
    if on_all:
        with contextlib.suppress(OSError):  # this network namespace has no IPv6
            return _listener(_socket.AF_INET6, "", with_ipv4=True)
        address = ""
    return _listener(family_of(address), address)


def _listener(family: int, address: str, with_ipv4: bool = False) -> Socket:
    listener = Socket(family, _socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        if family == _socket.AF_INET6:
            listener.setsockopt(
                _socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, int(not with_ipv4)
            )
        listener.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_DEFER_ACCEPT, _SILENT_S)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def family_of(address: str) -> int:
    return _socket.AF_INET6 if ":" in address else _socket.AF_INET


def make_room(files: int) -> int:
    """Raise the soft limit on open files, up to the hard one, if it leaves no room for so many.

    Where even that leaves none: how many of them there may be, half of what is left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    are_open = len(os.listdir("/proc/self/fd"))
    wanted = are_open + files
    if soft < wanted and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    return files if wanted <= hard else (hard - are_open) // 2


def parents_of(hosts: list[str]) -> list[int]:
    """Each rank's parent; -1 for rank 0.

    A host's first rank is below another host's first; the host's others are below it.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    within = FAN_OUT if len(members) == 1 else FAN_OUT // 2
    firsts = [ranks[0] for ranks in members.values()]
    parents = [-1] * len(hosts)
    for index, rank in enumerate(firsts[1:]):
        parents[rank] = firsts[index // (FAN_OUT // 2)]
    for ranks in members.values():
        for index, rank in enumerate(ranks[1:]):
            parents[rank] = ranks[index // within]
    return parents


def succession_of(hosts: list[str]) -> list[int]:
    """Which ranks judge, in this order: the first of each host, then the second of each.

    So a silent host costs one try.
    """
    seen: dict[str, int] = {}
    places = []
    for rank, host in enumerate(hosts):
        seen[host] = seen.get(host, -1) + 1
        places.append((seen[host], rank))
    return [rank for _, rank in sorted(places)]
