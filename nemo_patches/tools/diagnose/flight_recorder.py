"""The diagnosis of torch's Flight Recorder dumps: the first collective that not every rank has entered, who, and where.

Dumps are pickles or JSON, one a rank, whose number is the end of the file's name. The numbers of a process group's
collectives are compared, never clocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import plain_pickle
from nemo_patches.tools.diagnose.findings import CRITICAL, NOT_ENOUGH, NOTE, WARNING, Finding, Report
from nemo_patches.tools.diagnose.folder import UnreadableError

MISSING = "fr-missing-rank"
OUT_OF_STEP = "fr-out-of-step"
SIZES = "fr-sizes-differ"
UNFINISHED = "fr-not-completed"
NO_DUMP = "fr-no-dump"

_RANK_IN_NAME = re.compile(r"(\d{1,7})(?:\.\w{1,10})?$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<")
_MOST_FILES, _MOST_ENTRIES, _MOST_FRAMES = 10_000, 1_000_000, 64
_OWN_FRAMES = 3
_P2P = re.compile(r"\w+:(?:send|recv)\b")  # torch 2.3 has no is_p2p


@dataclass(frozen=True)
class Collective:
    """One that a rank has entered. order: of all that this rank has entered."""

    group: str
    number: int
    order: int
    name: str
    sizes: str
    completed: bool
    retired: bool  # completed, failed or given up
    where: str

    def __str__(self) -> str:
        place = f", from {self.where}" if self.where else ""
        return f"{self.name} {self.sizes}, number {self.number} of group {self.group}{place}"


@dataclass(frozen=True)
class Dump:
    """What one rank has recorded. groups: for each process group its ranks, if the dump tells."""

    rank: int
    collectives: tuple[Collective, ...]
    groups: dict[str, frozenset[int]]
    lost: bool  # its ring has lost what was before


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle, or JSON that begins as one does."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    is_json = start[:1] == b"{" and any(key in start for key in (b'"entries"', b'"pg_config"', b'"comm_lib_version"'))
    return start[:1] == b"\x80" or is_json


def diagnose_dumps(path: Path) -> Report:
    """The report on a dump, or on a folder of them. Raises UnreadableError where none can be read."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    dumps: dict[int, Dump] = {}
    problems = [f"{len(files)} files; only the first {_MOST_FILES} were read"] if len(files) > _MOST_FILES else []
    for file in files[:_MOST_FILES]:
        try:
            dump = _read(file)
        except (plain_pickle.NotPlainError, OSError, ValueError) as error:
            problems.append(f"{safe(file.name)}: {safe(str(error))[:200]}")
            continue
        if dump.rank in dumps:
            problems.append(f"{safe(file.name)}: another dump of rank {dump.rank}")
        dumps.setdefault(dump.rank, dump)
    if not dumps:
        raise UnreadableError(f"{path}: no Flight Recorder dump in it: {'; '.join(problems[:4]) or 'it is empty'}")
    findings = tuple(_findings(dumps)) or (_nothing(dumps),)
    return Report(
        folder=safe(str(path)),
        world_size=max((len(ranks) for dump in dumps.values() for ranks in dump.groups.values()), default=0),
        moving=False,
        verdict=findings[0].text,
        next_step=findings[0].next_step,
        findings=findings,
        ranks=(),
        problems=tuple(problems[:20]),
        earlier=(),
    )


def _read(file: Path) -> Dump:
    in_name = _RANK_IN_NAME.search(file.name)
    if in_name is None:
        raise ValueError("its name does not end in a rank")
    if file.stat().st_size > plain_pickle.LARGEST_BYTES:
        raise ValueError("too large")
    data = file.read_bytes()
    try:
        content = plain_pickle.load(data) if data[:1] == b"\x80" else json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("no Flight Recorder dump")
    configs = content.get("pg_config")
    groups = {str(name)[:80]: _ranks(config) for name, config in _items(configs)}
    collectives = [
        collective
        for order, entry in enumerate(content["entries"][-_MOST_ENTRIES:])
        if (collective := _collective(entry, order)) is not None
    ]
    ids = [entry.get("record_id") for entry in content["entries"][:1] if isinstance(entry, dict)]
    lost = len(content["entries"]) > _MOST_ENTRIES or any(isinstance(number, int) and number > 1 for number in ids)
    return Dump(int(in_name[1]), tuple(collectives), groups, lost)


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items())[:4096] if isinstance(mapping, dict) else []


def _ranks(config: Any) -> frozenset[int]:
    """As in "[0, 1]"; empty if not told."""
    text = config.get("ranks") if isinstance(config, dict) else None
    numbers = (
        re.findall(r"\d{1,7}", text[:1_000_000]) if isinstance(text, str) else text if isinstance(text, list) else []
    )
    return frozenset(int(number) for number in numbers if isinstance(number, str | int))


def _collective(entry: Any, order: int) -> Collective | None:
    """None for what is none: between two ranks, or malformed."""
    if not isinstance(entry, dict) or entry.get("is_p2p", _P2P.match(str(entry.get("profiling_name"))[:80])):
        return None
    # torch 2.3 has seq_id and pg_id alone.
    number, sizes = entry.get("collective_seq_id", entry.get("seq_id")), entry.get("input_sizes")
    group = entry.get("process_group", [entry.get("pg_id")])
    if not isinstance(number, int) or not isinstance(group, list | tuple) or not group:
        return None
    completed = entry.get("state") == "completed" or bool(entry.get("time_discovered_completed_ns"))
    return Collective(
        group=safe(str(group[0]))[:80] if isinstance(group[0], str | int) else "?",
        number=number,
        order=order,
        name=safe(entry["profiling_name"])[:80] if isinstance(entry.get("profiling_name"), str) else "?",
        sizes=_sizes(sizes),
        completed=completed,
        retired=completed or bool(entry.get("retired")),
        where=_where(entry.get("frames")),
    )


def _sizes(sizes: Any) -> str:
    """Of the inputs, as "[2, 3]"; only what is plain."""
    if not isinstance(sizes, list):
        return ""
    shapes = (shape for shape in sizes[:4] if isinstance(shape, list))
    return ", ".join(f"[{', '.join(str(n) for n in shape[:8] if isinstance(n, int))}]" for shape in shapes)[:200]


def _where(frames: Any) -> str:
    """The user's own code, innermost first."""
    texts = []
    for frame in frames[:_MOST_FRAMES] if isinstance(frames, list) else []:
        name, file, line = (
            (frame.get(key) for key in ("name", "filename", "line")) if isinstance(frame, dict) else [""] * 3
        )
        if isinstance(name, str) and isinstance(file, str) and isinstance(line, int) and not _LIBRARY.search(file):
            texts.append(f"{name} ({'/'.join(file.split('/')[-2:])}:{line})")
    return safe(" < ".join(texts[:_OWN_FRAMES]))[:300]


def _findings(dumps: dict[int, Dump]) -> Iterator[Finding]:
    found = [one for name, ranks in _groups(dumps) for one in _of_group(name, ranks, dumps)]
    waits = [one for one in found if isinstance(one, _Wait)]
    findings = [_missing(one, waits, dumps) if isinstance(one, _Wait) else one for one in found]
    yield from sorted(findings, key=lambda finding: (finding.severity != CRITICAL, finding.id == UNFINISHED))[:8]
    expected = {rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks}
    if absent := sorted(expected - dumps.keys()):
        yield Finding(
            id=NO_DUMP,
            severity=WARNING,
            ranks=tuple(absent[:64]),
            text=f"There is no dump of {named(absent)} here: killed, unable to write one, or its file is elsewhere.",
            next_step="Copy the dumps of every host here. A rank that was stopped or killed leaves none: look at its "
            "stderr.",
        )


@dataclass(frozen=True)
class _Wait:
    """The first collective of a group that not every rank has entered: who has, and who has not."""

    there: dict[int, Collective]
    absent: list[int]


def _groups(dumps: dict[int, Dump]) -> list[tuple[str, list[int]]]:
    """The groups by name, with their ranks among the dumps: those that any dump tells, else those that are in it.

    Groups of other ranks may have the same name: a rank's dump tells of its own groups alone.
    """
    groups = []
    for name in sorted({collective.group for dump in dumps.values() for collective in dump.collectives}):
        told = {ranks for dump in dumps.values() if (ranks := dump.groups.get(name))}
        unknown = [
            rank
            for rank, dump in dumps.items()
            if not any(rank in ranks for ranks in told)
            and (name == "0" or any(one.group == name for one in dump.collectives))
        ]
        groups += [(name, sorted(ranks & dumps.keys())) for ranks in sorted(told, key=sorted)]
        if len(told) == 1:
            groups[-1] = (name, sorted({*groups[-1][1], *unknown}))
        elif unknown:
            groups.append((name, sorted(unknown)))
    return groups


def _of_group(group: str, ranks: list[int], dumps: dict[int, Dump]) -> Iterator[Finding | _Wait]:
    """The first collective of a group in which its ranks are not alike."""
    entered = {rank: {one.number: one for one in dumps[rank].collectives if one.group == group} for rank in ranks}
    # Where a ring has lost entries, and has none of this group, the rank may have entered any.
    entered = {rank: of_rank for rank, of_rank in entered.items() if of_rank or not dumps[rank].lost}
    if len(entered) < 2:
        return
    # Each rank's ring begins where it has lost what was before.
    first = max((min(of_rank) for of_rank in entered.values() if of_rank), default=0)
    last = max((max(of_rank) for of_rank in entered.values() if of_rank), default=-1)
    tops = {rank: max(of_rank, default=-1) for rank, of_rank in entered.items()}
    for number in sorted({number for of_rank in entered.values() for number in of_rank if number >= first}):
        there = {rank: of_rank[number] for rank, of_rank in entered.items() if number in of_rank}
        absent = sorted(rank for rank, top in tops.items() if top < number)
        names, sizes = {one.name for one in there.values()}, {one.sizes for one in there.values()}
        if len(names) > 1 or (len(sizes) > 1 and any(word in "".join(names) for word in ("reduce", "broadcast"))):
            yield _unlike(group, there, len(names) > 1)
            return
        if there and absent:
            older = any(one.completed for one in there.values())
            yield _older(there, absent) if older else _Wait(there, absent)
            return
    unfinished = {
        rank: of_rank[last] for rank, of_rank in entered.items() if last in of_rank and not of_rank[last].retired
    }
    if len(unfinished) == len(entered):
        members = {
            rank for dump in dumps.values() for rank in dump.groups.get(group, frozenset()) if dump.rank in ranks
        }
        undumped = sorted(members - dumps.keys())
        who = f"All {len(entered)} ranks" if not undumped else f"All {len(entered)} ranks that have a dump"
        perhaps = f"; {named(undumped)} may not have entered it: there is no dump of it" if undumped else ""
        yield Finding(
            id=UNFINISHED,
            severity=CRITICAL,
            ranks=(),
            text=f"{who} have entered {next(iter(unfinished.values()))}, and none has completed it{perhaps}.",
            next_step="No rank of these dumps is missing: look at the network and the GPUs (NCCL_DEBUG=INFO), and at "
            "the ranks without a dump.",
        )


def _missing(wait: _Wait, waits: list[_Wait], dumps: dict[int, Dump]) -> Finding:
    """Who waits in a collective of another group, which not every rank has entered either, is not to blame."""
    there = wait.there
    waiting = {rank for other in waits if other is not wait for rank in other.there}
    group = next(iter(there.values())).group
    absent = [rank for rank in wait.absent if rank not in waiting and not _waits_elsewhere(dumps[rank], group)]
    if not absent:
        return _crossed(wait, waits)
    last = {rank: max(dumps[rank].collectives, key=lambda one: one.order, default=None) for rank in absent[:8]}
    have, are = "has" if len(absent) == 1 else "have", "is" if len(there) == 1 else "are"
    return Finding(
        id=MISSING,
        severity=CRITICAL,
        ranks=tuple(absent[:64]),
        text=f"{_capital(named(absent))} {have} not entered {next(iter(there.values()))}, which {named(sorted(there))} "
        f"{are} in, when the dumps were taken.",
        next_step="Look at what that rank did after its last collective: its data, a checkpoint, its stderr.",
        evidence=tuple(f"rank {rank}: its last collective: {one or 'none'}" for rank, one in last.items()),
    )


def _waits_elsewhere(dump: Dump, group: str) -> bool:
    """Whether a rank is in a collective of another group, perhaps with ranks without a dump. Gloo's do not tell."""
    return any(one.group != group and not one.retired and not one.name.startswith("gloo:") for one in dump.collectives)


def _crossed(wait: _Wait, waits: list[_Wait]) -> Finding:
    collectives = [next(iter(one.there.items())) for one in [wait, *(other for other in waits if other is not wait)]]
    return Finding(
        id=OUT_OF_STEP,
        severity=CRITICAL,
        ranks=(),
        text=f"Ranks wait in collectives of different groups: {named(sorted(wait.there))} in {collectives[0][1]}, and "
        f"{named(wait.absent)}, which {'has' if len(wait.absent) == 1 else 'have'} not entered that, in one of another "
        "group. Which rank is missing, these dumps do not tell.",
        next_step="Look for the dumps that are not here, and for code that makes collectives of several groups in an "
        "order that depends on the rank.",
        evidence=tuple(f"rank {rank}: {one}" for rank, one in collectives[:8]),
    )


def _older(there: dict[int, Collective], absent: list[int]) -> Finding:
    return Finding(
        id=NOT_ENOUGH,
        severity=NOTE,
        ranks=(),
        text=f"The dumps were not taken at one time: {next(iter(there.values()))} was completed, so {named(absent)} "
        "came to it after its own dump.",
        next_step="Take the dumps of all ranks while the job hangs.",
    )


def _unlike(group: str, there: dict[int, Collective], other_names: bool) -> Finding:
    # Whoever is in the smaller party need not be the one that is wrong.
    return Finding(
        id=OUT_OF_STEP if other_names else SIZES,
        severity=CRITICAL,
        ranks=(),
        text=f"In group {group} the ranks' collectives number {next(iter(there.values())).number} are not the same: "
        + "; ".join(dict.fromkeys(f"{one.name} {one.sizes} on {named(_alike(there, one))}" for one in there.values()))[
            :300
        ]
        + ".",
        next_step="A rank has made a collective more or fewer before, or gives another size: look for uneven batches, "
        "and for code that only some ranks run.",
        evidence=tuple(f"rank {rank}: {one}" for rank, one in list(there.items())[:8]),
    )


def _alike(there: dict[int, Collective], one: Collective) -> list[int]:
    return sorted(rank for rank, other in there.items() if (other.name, other.sizes) == (one.name, one.sizes))


def _nothing(dumps: dict[int, Dump]) -> Finding:
    return Finding(
        id=NOT_ENOUGH,
        severity=NOTE,
        ranks=(),
        text=f"The dumps of {named(sorted(dumps))} do not tell of a collective that not every rank has entered.",
        next_step="Give the dumps of all ranks, taken while the job hangs (TORCH_FR_DUMP_ON_TIMEOUT=1, and "
        "TORCH_FR_BUFFER_SIZE large enough).",
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
