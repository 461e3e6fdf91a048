"""Reader of torch's Flight Recorder dumps: which collectives of which groups each rank has entered,
and from where.

Dumps are pickles or JSON, one a rank, whose number follows "rank" in the file's name, or is its
end.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.judging.judge import Seat
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import plain_pickle
from nemo_patches.tools.diagnose.facts import Evidence, Fact, Member
from nemo_patches.tools.diagnose.frame_text import is_library, shown

LOOKED_FOR = 'Flight Recorder dumps: pickles, or JSON with "entries" or "pg_config"'
_RANK_IN_NAME = re.compile(
    r"rank[-_.]?(\d{1,7})(?!\d)|(\d{1,7})(?:\.\w{1,10})?$", re.IGNORECASE
)
_MOST_FILES, _MOST_ENTRIES, _MOST_FRAMES, _MOST_GROUPS = 10_000, 1_000_000, 64, 4096
_OWN_FRAMES = 3
_P2P = re.compile(r"\w+:(?:send|recv)\b")  # torch 2.3 has no is_p2p
# How the names of its collectives begin; its recorder never tells that one is completed
_GLOO = "gloo:"
_DEFAULT_GROUPS = ("0", "")
_KEYS = (b'"entries"', b'"pg_config"', b'"comm_lib_version"')


@dataclass(frozen=True)
class _Dump:
    """One rank's records. groups: the ranks of each process group in the dump.

    seats: by group, each with its time, in seconds since 1970. has_lost: the ring has lost older
    entries.
    """

    rank: int
    cite: str
    host: str
    seats: dict[str, list[tuple[Seat, float]]]
    groups: dict[str, frozenset[int]]
    has_lost: bool


def recognises(name: str, head: bytes) -> bool:
    """Whether a file that begins so may be a dump: a pickle, or JSON that begins as a dump does."""
    return head[:1] == b"\x80" or (
        head[:1] == b"{" and any(key in head for key in _KEYS)
    )


def read(files: list[Path], evidence: Evidence) -> None:
    """Add a seat for each collective, and each rank as a member."""
    dumps: dict[int, _Dump] = {}
    if len(files) > _MOST_FILES:
        evidence.problems.append(
            f"{len(files)} Flight Recorder dumps; only the first {_MOST_FILES} were read"
        )
    for file in files[:_MOST_FILES]:
        try:
            dump = _read(file)
        except (plain_pickle.NotPlainError, OSError, ValueError) as error:
            evidence.problems.append(f"{safe(file.name)}: {safe(str(error))[:200]}")
            continue
        if dump.rank in dumps:
            evidence.problems.append(
                f"{safe(file.name)}: another dump of rank {dump.rank}"
            )
        dumps.setdefault(dump.rank, dump)
    of_all = (
        len(dump.groups.get(name, ()))
        for dump in dumps.values()
        for name in _DEFAULT_GROUPS
    )
    evidence.world_size = max(evidence.world_size, *of_all, 0)
    for dump in dumps.values():
        evidence.facts.append(
            Fact(dump.rank, Member(evidence.world_size), dump.cite, host=dump.host)
        )
    groups = _groups(dumps)
    for name, ranks in groups:
        # Groups of other ranks may have the same name: a rank's dump lists its own groups only.
        is_alone = sum(other == name for other, _ in groups) == 1
        title = name if is_alone else f"{name} of {named(ranks)}"
        # Where a ring has lost entries, and has none of this group, the rank may have entered any.
        told = [
            rank
            for rank in ranks
            if name in dumps[rank].seats or not dumps[rank].has_lost
        ]
        evidence.groups.setdefault(title, set()).update(told)
        for dump in map(dumps.__getitem__, told):
            evidence.facts += (
                Fact(dump.rank, seat._replace(group=title), dump.cite, at, dump.host)
                for seat, at in dump.seats.get(name, ())
            )


def _groups(dumps: dict[int, _Dump]) -> list[tuple[str, list[int]]]:
    """The groups by name, with their ranks among the dumps: as listed in any dump, else the ranks
    with entries.
    """
    groups = []
    for name in sorted({name for dump in dumps.values() for name in dump.seats}):
        told = {ranks for dump in dumps.values() if (ranks := dump.groups.get(name))}
        unknown = [
            rank
            for rank, dump in dumps.items()
            if not any(rank in ranks for ranks in told)
            and (name == _DEFAULT_GROUPS[0] or name in dump.seats)
        ]
        groups += [
            (name, sorted(ranks & dumps.keys())) for ranks in sorted(told, key=sorted)
        ]
        if len(told) == 1:
            groups[-1] = (name, sorted({*groups[-1][1], *unknown}))
        elif unknown:
            groups.append((name, sorted(unknown)))
    return groups


def _read(file: Path) -> _Dump:
    in_name = _RANK_IN_NAME.search(
        file.name
    )  # the first one: "rank2_step42.pickle" is rank 2's
    if in_name is None:
        raise ValueError("its name has no rank, as nccl_trace_rank_3 has")
    if file.stat().st_size > plain_pickle.LARGEST_BYTES:
        raise ValueError("too large")
    data = file.read_bytes()
    try:
        content = plain_pickle.load(data) if data[:1] == b"\x80" else json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("no Flight Recorder dump")
    rank = int(in_name[1] or in_name[2])
    entries = content["entries"]
    seats: dict[str, list[tuple[Seat, float]]] = defaultdict(list)
    for entry in entries[-_MOST_ENTRIES:]:
        if (seat := _seat(rank, entry)) is not None:
            seats[seat.group].append((seat, _time(entry)))
    first = (
        entries[0].get("record_id")
        if entries and isinstance(entries[0], dict)
        else None
    )
    return _Dump(
        rank=rank,
        cite=safe(file.name),
        host=_text(content.get("host_name")),
        seats=dict(seats),
        groups={
            str(name)[:80]: _ranks(config)
            for name, config in _items(content.get("pg_config"))
        },
        has_lost=len(entries) > _MOST_ENTRIES or (isinstance(first, int) and first > 1),
    )


def _items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    return list(mapping.items())[:_MOST_GROUPS] if isinstance(mapping, dict) else ()


def _text(value: Any) -> str:
    return safe(value)[:80] if isinstance(value, str) else ""


def _ranks(config: Any) -> frozenset[int]:
    """As in "[0, 1]"; empty if not told."""
    told = config.get("ranks") if isinstance(config, dict) else None
    numbers = (
        re.findall(r"\d{1,7}", told[:1_000_000]) if isinstance(told, str) else told
    )
    return frozenset(
        map(int, filter(_is_rank, numbers if isinstance(numbers, list) else ()))
    )


def _is_rank(number: Any) -> bool:
    return isinstance(number, str) or (type(number) is int and 0 <= number < 10_000_000)


def _seat(rank: int, entry: Any) -> Seat | None:
    """None for what is no collective: between two ranks, or malformed."""
    if not isinstance(entry, dict) or entry.get(
        "is_p2p", _P2P.match(str(entry.get("profiling_name"))[:80])
    ):
        return None
    # torch 2.3 has seq_id and pg_id alone.
    number = entry.get("collective_seq_id", entry.get("seq_id"))
    group = entry.get("process_group", [entry.get("pg_id")])
    if not isinstance(number, int) or not isinstance(group, list | tuple) or not group:
        return None
    kind = _text(entry.get("profiling_name"))
    is_completed = entry.get("state") == "completed" or bool(
        entry.get("time_discovered_completed_ns")
    )
    is_done = is_completed or bool(
        entry.get("retired")
    )  # retired: also failed, or given up
    return Seat(
        rank=rank,
        group=safe(str(group[0]))[:80] if isinstance(group[0], str | int) else "?",
        number=number,
        kind=kind,
        size=_sizes(entry.get("input_sizes")),
        done=is_done or (None if kind.startswith(_GLOO) else False),
        completed=is_completed,
        caller=_caller(entry.get("frames")),
    )


def _time(entry: dict[str, Any]) -> float:
    created = entry.get("time_created_ns")
    return created / 1e9 if type(created) is int and 0 < created < 1 << 63 else 0.0


def _sizes(sizes: Any) -> str:
    """Of the inputs, as "[2, 3]"; only what is plain."""
    shapes = (
        (shape for shape in sizes[:4] if isinstance(shape, list))
        if isinstance(sizes, list)
        else ()
    )
    return ", ".join(
        f"[{', '.join(str(n) for n in shape[:8] if isinstance(n, int))}]"
        for shape in shapes
    )[:200]


def _caller(frames: Any) -> str:
    """The user's own code, innermost first."""
    texts = []
    for frame in frames[:_MOST_FRAMES] if isinstance(frames, list) else ():
        name, file, line = (
            map(frame.get, ("name", "filename", "line"))
            if isinstance(frame, dict)
            else ("", "", "")
        )
        if (
            isinstance(name, str)
            and isinstance(file, str)
            and isinstance(line, int)
            and not is_library(file)
        ):
            texts.append(shown(name, file, line, folders=1))
    return safe(" < ".join(texts[:_OWN_FRAMES]))[:300]
