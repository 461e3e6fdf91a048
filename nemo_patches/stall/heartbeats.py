"""What ranks tell each other through the job's store: heartbeats and who is missing, as JSON of bounded size.

What a peer has sent is data: its types are checked, its size is bounded, it is printed without control characters, and
nothing of it is evaluated.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch.distributed as dist

from .rank_text import ELSEWHERE, LATE, LEFT, SILENT, UNANNOUNCED, named, ranges, safe

LONGEST = 4096  # bytes of a heartbeat; a longer one is not taken
LONGEST_REPORT = 1 << 18
DETAILED = 4  # missing ranks of which a report tells where they are; of the others it tells which they are
_ENCODERS = 16
_WORKERS = 32
_KEYS_PER_REQUEST = 256
# One bit for each rank in a number that ranks add to: every kind of store can add.
_RANKS_PER_KEY = 62

_KINDS = (ELSEWHERE, SILENT, LEFT, UNANNOUNCED, LATE)


@dataclass(frozen=True)
class Beat:
    """One heartbeat. `number` rises from beat to beat: one that stands still is a heart that has stopped."""

    rank: int
    number: int
    host: str
    pid: int
    versions: str
    settings: str
    phase: str
    encoder: str  # of the last call; empty before the first
    calls: int  # of all encoders
    clock: tuple[int, ...]  # of the last call's encoder: training calls, evaluation calls since
    idle: float  # seconds since the last encoder call began; -1 before the first
    rounds: dict[str, int]  # by encoder, those called last: the rounds that this rank has come to
    fallbacks: int = 0  # of all encoders that live
    waited: float = 0.0  # seconds, in all their length syncs
    issued: int = 0  # rounds of theirs
    address: str = ""  # where it listens for who asks it directly; empty: nowhere
    port: int = 0
    where: str = ""  # what its training thread does, where the last call is long ago
    workers: tuple[int, ...] = ()  # process ids of data loader workers, then


@dataclass(frozen=True)
class MissingRank:
    """A rank that the others wait for.

    kind: "elsewhere", "no heartbeat", "left", "unannounced" or "late". The rest is what it last told: empty, 0 and -1
    where it told nothing, or where too many ranks are missing to tell of each. idle: seconds since its last encoder
    call began. where: what its training thread does, only if its heart beats. workers: process ids of its data
    loader's workers.
    """

    rank: int
    kind: str
    host: str = ""
    pid: int = 0
    calls: int = 0
    idle: float = -1.0
    where: str = ""
    workers: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = [*([self.host] if self.host else []), *([f"pid {self.pid}"] if self.pid else [])]
        who = f"rank {self.rank}" + (f" ({', '.join(place)})" if place else "")
        least = "at least " if self.kind == SILENT else ""
        last = f"; its last encoder call, {self.calls}, began {least}{self.idle:.1f} s ago" if self.idle >= 0 else ""
        workers = f"; its data loader's workers: pids {', '.join(map(str, self.workers))}" if self.workers else ""
        if self.kind == UNANNOUNCED:
            return f"{who} has not announced itself: not patched, not started, or not yet at a first encoder call"
        if self.kind == LEFT:
            return f"{who} has left: it ended, or destroyed its process group{last}"
        if self.kind == SILENT:
            meaning = "stopped, killed, its host unreachable, or something in it holds Python's lock (GIL)"
            return f"{who} has no heartbeat: {meaning}{last}"
        has = "is elsewhere" if self.kind == ELSEWHERE else "is late"
        return f"{who} {has}{': ' if self.where else ''}{self.where}{last}{workers}"


UNPATCHED = (
    "A rank that is not patched waits in the default process group, where the other ranks' next collective meets its "
    "reduce: the job then hangs, dies or reduces wrong numbers. What keeps it from being patched is on its stderr, and "
    "`nemo-patches status` says it there"
)


def encode(beat: Beat) -> bytes:
    """At most LONGEST bytes: what a reader can do without goes first."""
    short = replace(beat, rounds=dict(list(beat.rounds.items())[-_ENCODERS:]), workers=beat.workers[:_WORKERS])
    for one in (short, replace(short, workers=()), replace(short, workers=(), where="")):
        text = _bytes(asdict(one))
        if len(text) <= LONGEST:
            return text
    return _bytes(asdict(replace(short, workers=(), where="", rounds={}, settings="", encoder="")))


def decode(data: bytes) -> Beat | None:
    """A peer's heartbeat; None for what is none."""
    beat: Beat | None = _checked(Beat, _json(data, LONGEST))
    return beat


def encode_missing(missing: Iterable[MissingRank]) -> bytes:
    """What one waiting rank found out, for the others. All ranks are named, the first DETAILED with all they told."""
    found = sorted(missing, key=lambda one: one.rank)
    kinds = {kind: ranges(one.rank for one in found if one.kind == kind) for kind in _KINDS}
    details = [asdict(one) for one in found[:DETAILED]]
    return _bytes({"kinds": kinds, "details": details})


def decode_missing(data: bytes, size: int) -> tuple[MissingRank, ...] | None:
    """The missing ranks, in rising order, of `size` ranks in all; None for what is no such report."""
    content = _json(data, LONGEST_REPORT)
    try:
        details = [one for detail in content["details"][:DETAILED] if (one := _checked(MissingRank, detail))]
        known = {one.rank: one for one in details}
        found = {
            rank: known.get(rank) or MissingRank(rank, kind)
            for kind in _KINDS
            for first, last in content["kinds"][kind]
            for rank in range(max(int(first), 0), min(int(last), size - 1) + 1)
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return tuple(found[rank] for rank in sorted(found))


def encode_texts(texts: dict[str, str]) -> bytes:
    return _bytes(texts)


def decode_texts(data: bytes) -> dict[str, str]:
    """Short texts by name; empty for what is none."""
    content = _json(data, LONGEST_REPORT)
    if not isinstance(content, dict):
        return {}
    return {safe(name): safe(text) for name, text in content.items() if isinstance(text, str)}


def innermost(store: dist.Store) -> dist.Store:
    """The store itself, without the prefixes around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def own_connection(store: dist.Store) -> dist.Store:
    """A connection to the same store that no one else uses; the store itself where its kind has none."""
    if hasattr(store, "clone"):  # newer torch; keeps the prefixes
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()  # type: ignore[no-any-return]
    inner = innermost(store)
    if isinstance(inner, dist.TCPStore):
        return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False)
    return store


def announce(store: dist.Store, beat: Beat) -> None:
    """The first heartbeat, and then the sign that there is one."""
    store.set(_beat_key(beat.rank), encode(beat).decode())
    store.add(_present_key(beat.rank), 1 << beat.rank % _RANKS_PER_KEY)
    store.add("announced", 1)


def announced(store: dist.Store) -> int:
    """How many ranks have announced themselves, in one request."""
    return int(store.add("announced", 0))


def present(store: dist.Store, size: int) -> set[int]:
    """The ranks that have announced themselves: one request for each 62 ranks."""
    found: set[int] = set()
    for first in range(0, size, _RANKS_PER_KEY):
        bits = store.add(_present_key(first), 0)
        found.update(rank for rank in range(first, min(first + _RANKS_PER_KEY, size)) if bits >> rank - first & 1)
    return found


def send(store: dist.Store, beat: Beat) -> None:
    """Waits for no answer."""
    store.set(_beat_key(beat.rank), encode(beat).decode())


def read(store: dist.Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """The latest heartbeats of ranks that have announced themselves, by rank."""
    wanted = sorted(ranks)
    found: dict[int, Beat] = {}
    for start in range(0, len(wanted), _KEYS_PER_REQUEST):
        some = wanted[start : start + _KEYS_PER_REQUEST]
        for rank, data in zip(some, store.multi_get([_beat_key(rank) for rank in some]), strict=True):
            beat = decode(data)
            if beat is not None and beat.rank == rank:
                found[rank] = beat
    return found


def told(missing: tuple[MissingRank, ...], size: int) -> str:
    """The missing ranks, at least one, for a person: all named, and of the first few what they do."""
    lines = [str(one) for one in missing[:DETAILED]]
    if len(missing) > DETAILED:
        lines += _counted(missing[DETAILED:])
    if any(one.kind == UNANNOUNCED for one in missing):
        lines.append(UNPATCHED)
    return f"{named(one.rank for one in missing)} of {size} | " + " | ".join(lines)


def _counted(rest: tuple[MissingRank, ...]) -> Iterator[str]:
    for kind in _KINDS:
        ranks = [one.rank for one in rest if one.kind == kind]
        if ranks:
            yield f"{len(ranks)} more {kind}: {named(ranks)}"


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
    """An instance of the dataclass with every field of the type that it should have; None where one is not."""
    if not isinstance(content, dict):
        return None
    checked: dict[str, Any] = {}
    for field in fields(kind):
        value = content.get(field.name)
        try:
            checked[field.name] = _CHECKS[str(field.type)](value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None
    return kind(**checked)


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


def _whole_numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(_whole, list(value)[:_WORKERS]))


def _rounds(value: Any) -> dict[str, int]:
    return {_text(key): _whole(number) for key, number in list(value.items())[:_ENCODERS]}


_CHECKS: dict[str, Any] = {
    "int": _whole,
    "str": _text,
    "float": _seconds,
    "tuple[int, ...]": _whole_numbers,
    "dict[str, int]": _rounds,
}


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _present_key(rank: int) -> str:
    return f"present/{rank // _RANKS_PER_KEY}"
