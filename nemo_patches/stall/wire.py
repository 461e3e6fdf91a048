"""What ranks send each other, as JSON of bounded size: heartbeats, missing ranks, addresses and short texts.

What a peer has sent is data: its types are checked, its size is bounded, it is printed without control characters, and
nothing of it is evaluated.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from ..channel.safe_text import safe
from .heartbeat import Heartbeat
from .missing_rank import DETAILED, MissingRank
from .rank_groups import RankGroup
from .rank_text import ELSEWHERE, KINDS, ranges

LONGEST_HEARTBEAT = 8192  # bytes; a longer one is not taken
LONGEST_REPORT = 1 << 18  # bytes
_LONGEST_PEER = 1 << 8  # bytes, of one rank among all
TOKEN_BYTES = 16
_MOST_ENCODERS = 64
_MOST_WORKERS = 32
_MOST_GROUPS = 40


class Peer(NamedTuple):
    """Where a rank's process is, and where it listens. The address is empty where it does not."""

    host: str
    pid: int
    address: str
    port: int


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """At most LONGEST_HEARTBEAT bytes: what a reader can do without goes first."""
    rounds = dict(list(heartbeat.rounds.items())[-_MOST_ENCODERS:])
    whole = heartbeat.whole and len(rounds) == len(heartbeat.rounds)
    apart = dict(list(heartbeat.apart.items())[-_MOST_ENCODERS:])
    short = replace(heartbeat, rounds=rounds, apart=apart, whole=whole, workers=heartbeat.workers[:_MOST_WORKERS])
    without_workers = replace(short, workers=(), worker_states=())
    for candidate in (short, replace(short, worker_states=()), without_workers, replace(without_workers, where="")):
        data = _bytes(asdict(candidate))
        if len(data) <= LONGEST_HEARTBEAT:
            return data
    return _bytes(asdict(replace(without_workers, where="", rounds={}, apart={}, whole=False, settings="", encoder="")))


def decode_heartbeat(data: bytes) -> Heartbeat | None:
    """A peer's heartbeat; None if malformed."""
    heartbeat: Heartbeat | None = _checked(Heartbeat, _json(data, LONGEST_HEARTBEAT))
    return heartbeat


def encode_missing(missing: Iterable[MissingRank]) -> bytes:
    """What one waiting rank found out, for the others. All ranks are named, and the first DETAILED described."""
    in_order = sorted(missing, key=lambda rank: rank.rank)
    kinds = {kind: ranges(rank.rank for rank in in_order if rank.kind == kind) for kind in KINDS}
    return _bytes({"kinds": kinds, "details": [asdict(rank) for rank in in_order[:DETAILED]]})


def decode_missing(data: bytes, size: int) -> tuple[MissingRank, ...] | None:
    """The missing ranks, in rising order, of `size` ranks in all; None if malformed."""
    content = _json(data, LONGEST_REPORT)
    try:
        details = [_checked(MissingRank, detail) for detail in content["details"][:DETAILED]]
        detailed = {detail.rank: detail for detail in details if detail}
        missing = {
            rank: detailed.get(rank) or MissingRank(rank, kind)
            for kind in KINDS
            for first, last in content["kinds"].get(kind, ())  # an older nemo_patches knows fewer
            for rank in range(max(int(first), 0), min(int(last), size - 1) + 1)
        }
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError):
        return None
    return tuple(missing[rank] for rank in sorted(missing))


def encode_groups(groups: Iterable[RankGroup]) -> bytes:
    """Of at most _MOST_GROUPS; the ranks of the others become one group, whose place nobody knows."""
    kept = list(groups)
    if len(kept) > _MOST_GROUPS:
        others = sorted(rank for group in kept[_MOST_GROUPS - 1 :] for rank in group.ranks)
        kept = [*kept[: _MOST_GROUPS - 1], RankGroup(tuple(ranges(others)), ELSEWHERE)]
    return _bytes([asdict(group) for group in kept])


def decode_groups(data: bytes, size: int) -> tuple[RankGroup, ...]:
    """The groups, of `size` ranks in all; empty if malformed."""
    content = _json(data, LONGEST_REPORT)
    checked = [_checked(RankGroup, group) for group in content[:_MOST_GROUPS]] if isinstance(content, list) else []
    groups = tuple(group for group in checked if group is not None)
    are_within = all(0 <= first <= last < size for group in groups for first, last in group.runs)
    return groups if are_within and len(groups) == len(checked) else ()


def encode_texts(texts: Mapping[str, str]) -> bytes:
    return _bytes(dict(texts))


def decode_texts(data: bytes) -> dict[str, str]:
    """Short texts by name; empty if malformed."""
    content = _json(data, LONGEST_REPORT)
    if not isinstance(content, dict):
        return {}
    return {safe(name): safe(text) for name, text in content.items() if isinstance(text, str)}


def encode_peers(peers: Mapping[int, Peer], token: bytes) -> str:
    return json.dumps({"token": token.hex(), "peers": {str(rank): peer for rank, peer in peers.items()}})


def decode_peers(data: bytes, size: int) -> tuple[dict[int, Peer], bytes]:
    """The peers by rank, for `size` ranks in all, and the token that they want to hear; both empty if malformed."""
    try:
        content = _json(data, max(LONGEST_REPORT, size * _LONGEST_PEER))
        peers = {int(rank): _peer(*peer) for rank, peer in content["peers"].items()}
        token = bytes.fromhex(content["token"])
        if len(token) != TOKEN_BYTES:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}, b""
    return {rank: peer for rank, peer in peers.items() if 0 <= rank < size}, token


def _peer(host: str, pid: int, address: str, port: int) -> Peer:
    return Peer(safe(host), int(pid), str(ipaddress.ip_address(address)) if address else "", int(port) & 0xFFFF)


def _bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")  # a file's name may be no text at all


def _json(data: bytes, longest: int) -> Any:
    if len(data) > longest:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _checked(kind: type[Any], content: Any) -> Any:
    """An instance of the dataclass with every field of the type that it should have; None where one is not.

    What a rank with an older nemo_patches does not say is as by default; what a newer one says is passed over.
    """
    checks = {field.name: _CHECKS[str(field.type)] for field in fields(kind)}
    try:
        return kind(**{name: checks[name](value) for name, value in content.items() if name in checks})
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return safe(value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not -1 <= value < 1e12:
        raise TypeError
    return float(value)


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {  # by a field's annotation
    "bool": _yes_or_no,
    "int": _whole,
    "str": _text,
    "float": _seconds,
    "tuple[int, ...]": lambda value: tuple(map(_whole, list(value)[:_MOST_WORKERS])),
    "tuple[str, ...]": lambda value: tuple(map(_text, list(value)[:_MOST_WORKERS])),
    "tuple[tuple[int, int], ...]": lambda value: tuple((_whole(first), _whole(last)) for first, last in value),
    "dict[str, str]": lambda value: {_text(key): _text(v) for key, v in list(value.items())[:_MOST_ENCODERS]},
    "dict[str, int]": lambda value: {_text(key): _whole(n) for key, n in list(value.items())[:_MOST_ENCODERS]},
}
