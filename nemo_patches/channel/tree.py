"""The side channel's tree: this rank's place in it, found through the job's store, and its connections."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..text import safe
from .keys import DOOR, HOSTS, MIRRORED_DOOR, PLACE, PRESENT, ROOT
from .presence import add_bit
from .process import Process, this_machine

try:
    import fcntl
    import resource
except ModuleNotFoundError:  # not Unix: no rank runs there, but `nemo-patches diagnose` reads files there
    pass

FAN_OUT = 16  # children of a rank, at most
# The format of messages. Ranks with different formats share rounds, but no surveys.
ROUNDS_ONLY, FORMAT = 0, 1
_HELLO = struct.Struct("<16sqII8s")  # token, rank, format, pid, machine
_HELLO_S = 0.005
_MESSAGE = struct.Struct("<8sqq")  # key, number, value
_NOTE, _PART = -4, -5  # instead of a number: this many bytes of a note follow; the last ones, or not
_FRAME_BYTES = 4096  # of a note at a time, so that rounds' messages do not wait for a whole note
LONGEST_NOTE = 1 << 20
_CONNECT_S, _SILENT_S, BACKLOG = 2.0, 5, 1024  # clients that wait to be accepted
_SIOCGIFADDR = 0x8915  # Linux: asks for an interface's address
# The kernel's own keepalive packets detect that the other end has lost the connection, or is cut off.
KEEPALIVE_S, CUT_OFF_S = 5, 25
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class Message(NamedTuple):
    """24 bytes. number: of the round; a negative one says what else this is."""

    key: bytes
    number: int
    value: int


class Connection:
    """A socket to a child or the parent. It never blocks. Rounds' messages overtake notes that wait to be sent."""

    def __init__(self, own: socket.socket, rank: int, process: Process | None = None, format_: int = 0) -> None:
        """process and format_: the other end's; the parent's are known once it has accepted this rank."""
        self.socket = own
        self.rank = rank
        self.process = process
        self.format = format_
        self.is_lost = False
        self.is_cut = False  # lost, because the other end sends nothing at all
        self.heard_at = time.monotonic()  # when something last came
        self._received = bytearray()
        self._note = bytearray()  # as far as it has come
        self._unsent = b""  # the rest of what is being sent
        self._messages = bytearray()  # to be sent next
        self._frames = deque[bytes]()  # of a note, after them
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CUT_OFF_S)

    def send(self, key: bytes, number: int, value: int) -> None:
        """Each key has one message under way per direction, then its answer, so hardly any wait to be sent."""
        self._messages += _MESSAGE.pack(key, number, value)
        self.flush()

    def send_note(self, note: bytes) -> bool:
        """Whether it is being sent: not while too much of earlier notes is unsent, nor to a format without notes."""
        if len(self._frames) * _FRAME_BYTES >= LONGEST_NOTE or self.format != FORMAT or len(note) > LONGEST_NOTE:
            return False
        for start in range(0, len(note), _FRAME_BYTES) or (0,):
            part = note[start : start + _FRAME_BYTES]
            is_last = start + _FRAME_BYTES >= len(note)
            self._frames.append(_MESSAGE.pack(bytes(8), _NOTE if is_last else _PART, len(part)) + part)
        self.flush()
        return True

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent or self._messages or self._frames)

    def flush(self) -> None:
        """As much as the socket takes: the rest of a frame, then rounds' messages, then the next frame."""
        try:
            while self.waits:
                if not self._unsent and self._messages:
                    self._unsent = bytes(self._messages)
                    self._messages.clear()
                elif not self._unsent:
                    self._unsent = self._frames.popleft()
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # `receive` sees it, too
            self.is_lost = True

    def receive(self) -> list[Message | bytes] | None:
        """The messages and notes that have come; None if the connection is lost, or the data is neither."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.is_cut = is_silence(error)
            return None
        self._received += data
        self.heard_at = time.monotonic()
        found, at = list[Message | bytes](), 0
        while len(self._received) - at >= _MESSAGE.size:
            message = Message(*_MESSAGE.unpack_from(self._received, at))
            size = _MESSAGE.size
            if message.number in (_NOTE, _PART):
                size += message.value
                if not 0 <= message.value <= _FRAME_BYTES or len(self._note) + message.value > LONGEST_NOTE:
                    return None
                if len(self._received) - at < size:
                    break
                self._note += self._received[at + _MESSAGE.size : at + size]
                if message.number == _NOTE:
                    found.append(bytes(self._note))
                    self._note.clear()
            else:
                found.append(message)
            at += size
        del self._received[:at]
        return found if data else None


def is_silence(error: OSError) -> bool:
    """Whether no host has answered. Otherwise the host has no such connection, or nothing listens there."""
    return isinstance(error, TimeoutError) or error.errno in _SILENCE


class Door(NamedTuple):
    """Where a rank listens for its children, and the token that they must present."""

    address: str
    port: int
    token: bytes


class Resident(NamedTuple):
    """A rank's host, process and format."""

    host: str
    pid: int
    format: int


class Place:
    """Where this rank is in the tree. Never waits for another rank. Methods raise OSError and the store's errors."""

    def __init__(self, server: tuple[str, int] | None, rank: int, size: int) -> None:
        """server: the store's, if it has one."""
        self.parent, self.children, self.is_known = -1, frozenset[int](), False  # parent -1: rank 0 has none
        self.neighbours = frozenset[int]()  # the children and the parent; in the second tree, those with surveys
        self.is_mirrored = False  # whether it is the second tree, which is upside down
        self.machine = this_machine()
        self._server, self._rank, self._hosts = server, rank, [rank] * size
        self.present_in = self.attempt = -1  # the attempt in which this rank has announced itself, and its current one
        self.problem = self._address = self._store_address = ""  # why there is no tree; this host's, and the store's
        self.all_parents: list[int] = []  # of all ranks, by rank
        self.format = ROUNDS_ONLY  # this rank's; set before it registers
        self.residents: list[Resident] = []  # of all ranks
        self._door_key = DOOR
        self._own_door: Door | None = None
        self._parents_door: Door | None = None

    def find(self, store: Any, attempt: int) -> bool:
        """Whether the tree is known: once every rank has registered.

        Ranks say so once rank 0 has come: what was left before that may be of processes that have died since.
        """
        if attempt != self.present_in:
            add_bit(store, PRESENT, self._rank)
            self.present_in = attempt
        if attempt != self.attempt:
            if self._rank > 0 and not store.check([ROOT]):
                return False
            try:
                self.problem, (self._address, self._store_address) = "", here_and_store(self._server)
            except ValueError as error:
                self.problem = f"rank {self._rank} cannot take part: {error}"
            own = [socket.gethostname(), self.problem, os.getpid(), self.format]
            store.set(PLACE.format(rank=self._rank), json.dumps(own))
            store.set(ROOT, "")
            self.attempt = attempt
        if self._rank == 0 and store.check(keys := [PLACE.format(rank=rank) for rank in range(len(self._hosts))]):
            hosts, problems, *others = zip(*map(json.loads, store.multi_get(keys)), strict=True)
            names = sorted(set(hosts))
            store.set(HOSTS, json.dumps([[names.index(host) for host in hosts], max(problems), names, *others]))
        # Of another size: from an earlier attempt, which had no such rank.
        if store.check([HOSTS]) and len((told := json.loads(store.get(HOSTS)))[0]) == len(self._hosts):
            self._hosts, self.problem, names, pids, formats = told
            self.problem = safe(self.problem)
            self.residents = [
                Resident(safe(names[host]), int(pid), int(format_))
                for host, pid, format_ in zip(self._hosts, pids, formats, strict=True)
            ]
            self._settle(parents(self._hosts, FAN_OUT))
        return self.is_known

    def find_mirrored(self, place: Place) -> None:
        """By what is known of the place in the first tree: this one has the same ranks, upside down."""
        self._hosts, self._address, self._store_address = place._hosts, place._address, place._store_address
        self.attempt, self.format, self.residents = place.attempt, place.format, place.residents
        self.is_mirrored, self._door_key = True, MIRRORED_DOOR
        self._settle(mirrored(self._hosts, FAN_OUT))
        self.neighbours -= {rank for rank in self.neighbours if self.residents[rank].format != FORMAT}

    def _settle(self, found: list[int]) -> None:
        self.all_parents = found
        self.children = frozenset(rank for rank, parent in enumerate(found) if parent == self._rank)
        self.parent = found[self._rank]
        self.neighbours = self.children | ({self.parent} if self.parent >= 0 else set())
        self.is_known = True

    def listen(self, store: Callable[[], Any]) -> socket.socket:
        """A port for the children: the one that they know, where there has been one.

        store: gives the store, where they find another port, and the token. Not called while they know the port.
        """
        address = "" if self._is_loopback_apart(self._address, self.children) else self._address
        if self._own_door is not None:
            with contextlib.suppress(OSError):  # another process has this port
                return listening(address, self._address, self._own_door.port)
        listener = listening(address, self._address)
        try:
            # A new token: who listens at the old port now may be told the old one.
            door = Door(self._address, listener.getsockname()[1], secrets.token_bytes(16))
            told = json.dumps([door.address, door.port, door.token.hex()])
            store().set(self._door_key.format(rank=self._rank), told)
        except BaseException:
            listener.close()
            raise
        self._own_door = door
        return listener

    def admit(self, listener: socket.socket) -> Connection | None:
        """A child that knows the token, also one that is connected: it has lost that connection, this end has not yet.

        Everybody else is dropped at once. OSError: there are no files left.
        """
        assert self._own_door is not None
        with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError, struct.error):
            visitor, _ = listener.accept()
            visitor.settimeout(_HELLO_S)  # said already, where the kernel holds back who says nothing
            said, rank, format_, pid, machine = _HELLO.unpack(visitor.recv(_HELLO.size))
            if hmac.compare_digest(said, self._own_door.token) and rank in self.children:
                return Connection(visitor, rank, Process(pid, machine), format_)
        return None

    def find_door(self, store: Any) -> Door | None:
        """Where the parent listens; None: not known yet. Any thread."""
        if not store.check([key := self._door_key.format(rank=self.parent)]):
            return None
        address, port, token = json.loads(store.get(key))
        return Door(address, port, bytes.fromhex(token))

    def take_door(self, door: Door | None) -> bool:
        """Connect there from now on; returns whether this has changed."""
        before = self._parents_door
        self._parents_door = door or before
        return self._parents_door != before

    def knock(self) -> Connection | None:
        """A connection to the parent, which has not accepted this rank yet; None: its port is not known."""
        if (door := self._parents_door) is None:
            return None
        is_apart = self._is_loopback_apart(door.address, [self.parent])
        own = socket.create_connection((self._store_address if is_apart else door.address, door.port), _CONNECT_S)
        own.sendall(_HELLO.pack(door.token, self._rank, self.format, os.getpid(), self.machine))
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
    """Each rank's parent, with at most `fan_out` children; -1 for rank 0. One connection leaves each other host."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    within = min(max(map(len, members.values())) - 1, fan_out if len(members) == 1 else fan_out // 2)
    found, first = [-1] * len(hosts), [ranks[0] for ranks in members.values()]
    for ranks, children in ((first, fan_out - within), *((ranks, within) for ranks in members.values())):
        for index, rank in enumerate(ranks[1:]):
            found[rank] = ranks[index // children]
    return found


def mirrored(hosts: Sequence[int], fan_out: int) -> list[int]:
    """The same tree upside down, of the last rank: whose inner ranks are leaves there, unless a host has but one."""
    last = len(hosts) - 1
    found = parents(hosts[::-1], fan_out)
    return [last - parent if parent >= 0 else -1 for parent in found[::-1]]


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
