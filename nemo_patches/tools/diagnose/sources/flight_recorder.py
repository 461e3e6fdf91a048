"""Reader of torch's Flight Recorder dumps:
which collectives of which groups each rank has entered, and from where.

Dumps are pickles or JSON, one a rank, whose number follows "rank" in the file's name, or is its
end.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import plain_pickle
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.frame_text import is_library, shown
from nemo_patches.tools.diagnose.rank_facts import Evidence, Fact, ProcessRank
from nemo_patches.tools.diagnose.sources.lines import DEFAULT_GROUPS

_RANK_IN_NAME = re.compile(
    r"rank[-_.]?(\d{1,7})(?!\d)|(\d{1,7})(?:\.\w{1,10})?$", re.IGNORECASE
)
_MOST_ENTRIES, _MOST_FRAMES, _MOST_GROUPS = 1_000_000, 64, 4096
_OWN_FRAMES = 3
# How the names of its collectives begin; its recorder never tells that one is completed
_GLOO = "gloo:"
_KEYS = (b'"entries"', b'"pg_config"', b'"comm_lib_version"')
_WITHIN = b'"flight_recorder"'  # in a stall report, which has one within


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Recorded(msgspec.Struct):
    """What of one collective's record is read; of none that is malformed."""

    collective_seq_id: int
    process_group: list[str | int]
    record_id: int = 0
    profiling_name: str = ""
    is_p2p: bool = False
    state: str | None = None
    time_discovered_completed_ns: int | None = None
    retired: bool = False  # completed, failed, or given up
    input_sizes: list[list[int]] = msgspec.field(default_factory=list)
    frames: list[_Frame] = msgspec.field(default_factory=list)
    time_created_ns: int = 0


class _Group(msgspec.Struct):
    ranks: str | list[int] = ""  # as in "[0, 1]"


class _Content(msgspec.Struct):
    entries: list[Any]
    pg_config: dict[str | int, _Group] = msgspec.field(default_factory=dict)
    host_name: str = ""


@dataclass(frozen=True)
class _Dump:
    """One rank's records. groups: the ranks of each process group in the dump.

    entries: by group, each with its time, in seconds since 1970. has_lost: the ring has lost older
    entries.
    """

    rank: int
    cite: str
    host: str
    entries: dict[str, list[tuple[Entry, float]]]
    groups: dict[str, frozenset[int]]
    has_lost: bool


def recognises(name: str, head: bytes) -> bool:
    """Whether a file that begins so may be a dump: a pickle, or JSON that begins as a dump does."""
    return head[:1] == b"\x80" or (
        head[:1] == b"{" and _WITHIN not in head and any(key in head for key in _KEYS)
    )


def read(files: list[Path], evidence: Evidence) -> None:
    """Add an entry for each collective, and each rank as a member."""
    dumps: dict[int, _Dump] = {}
    for file in files:
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
        for name in DEFAULT_GROUPS
    )
    evidence.world_size = max(evidence.world_size, *of_all, 0)
    for dump in dumps.values():
        evidence.facts.append(
            Fact(dump.rank, ProcessRank(evidence.world_size), dump.cite, host=dump.host)
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
            if name in dumps[rank].entries or not dumps[rank].has_lost
        ]
        evidence.groups.setdefault(title, set()).update(told)
        for dump in map(dumps.__getitem__, told):
            evidence.facts += (
                Fact(dump.rank, entry._replace(group=title), dump.cite, at, dump.host)
                for entry, at in dump.entries.get(name, ())
            )


def _groups(dumps: dict[int, _Dump]) -> list[tuple[str, list[int]]]:
    """The groups by name, with their ranks among the dumps: as listed in any dump, else the ranks
    with entries.
    """
    groups = []
    for name in sorted({name for dump in dumps.values() for name in dump.entries}):
        told = {ranks for dump in dumps.values() if (ranks := dump.groups.get(name))}
        unknown = [
            rank
            for rank, dump in dumps.items()
            if not any(rank in ranks for ranks in told)
            and (name == "0" or name in dump.entries)
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
    # The first one: "rank2_step42.pickle" is rank 2's.
    in_name = _RANK_IN_NAME.search(file.name)
    if in_name is None:
        raise ValueError("its name has no rank, as nccl_trace_rank_3 has")
    if file.stat().st_size > plain_pickle.LARGEST_BYTES:
        raise ValueError("too large")
    data = file.read_bytes()
    try:
        plain = plain_pickle.load(data) if data[:1] == b"\x80" else json.loads(data)
        content = msgspec.convert(plain, _Content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"no Flight Recorder dump: {error}") from error
    rank = int(in_name[1] or in_name[2])
    entries: dict[str, list[tuple[Entry, float]]] = defaultdict(list)
    first_id = 0
    for told in content.entries[-_MOST_ENTRIES:]:
        try:
            recorded = msgspec.convert(told, _Recorded)
        except (ValueError, RecursionError):
            continue
        first_id = first_id or recorded.record_id
        if recorded.process_group and not recorded.is_p2p:
            entry = _entry(rank, recorded)
            entries[entry.group].append((entry, max(0, recorded.time_created_ns) / 1e9))
    return _Dump(
        rank=rank,
        cite=safe(file.name),
        host=safe(content.host_name, 80),
        entries=dict(entries),
        groups={
            safe(str(name), 80): _ranks(group.ranks)
            for name, group in list(content.pg_config.items())[:_MOST_GROUPS]
        },
        has_lost=first_id > 1 or len(content.entries) > _MOST_ENTRIES,
    )


def _ranks(told: str | list[int]) -> frozenset[int]:
    """Empty if not told."""
    text = told if isinstance(told, str) else str(told)
    return frozenset(map(int, re.findall(r"\b\d{1,7}\b", text[:1_000_000])))


def _entry(rank: int, recorded: _Recorded) -> Entry:
    kind = safe(recorded.profiling_name, 80)
    is_completed = recorded.state == "completed" or bool(
        recorded.time_discovered_completed_ns
    )
    is_done = is_completed or recorded.retired
    return Entry(
        rank=rank,
        group=safe(str(recorded.process_group[0]), 80),
        number=recorded.collective_seq_id,
        kind=kind,
        size=safe(", ".join(str(shape[:8]) for shape in recorded.input_sizes[:4]), 200),
        done=is_done or (None if kind.startswith(_GLOO) else False),
        completed=is_completed,
        caller=_caller(recorded.frames),
    )


def _caller(frames: list[_Frame]) -> str:
    """The user's own code, innermost first."""
    own = [one for one in frames[:_MOST_FRAMES] if not is_library(one.filename)]
    texts = (
        shown(one.name, one.filename, one.line, folders=1) for one in own[:_OWN_FRAMES]
    )
    return safe(" < ".join(texts), 300)
