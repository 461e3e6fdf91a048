"""All that lies in files and folders:
each file goes to the reader that recognises it; what they tell is joined.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.rank_facts import Evidence, UnreadableError
from nemo_patches.tools.diagnose.sources import (
    dumps,
    flight_recorder,
    logs,
    report_files,
    stack_files,
    traces,
)

_ATTEMPT = re.compile(r"(.*/)?attempt_(\d{1,6})(?=/)")  # of torchrun --log-dir
# Code and data may lie beside a job's logs, and some of it looks like evidence. A file that is
# named itself is read.
_FOLDERS_OF_CODE = frozenset(
    {"__pycache__", "node_modules", "site-packages", "dist-packages"}
)
_NO_EVIDENCE = re.compile(
    r"\.(pyi?|ipynb|rst|diff|patch|sh|c|cc|cpp|cu|h|ya?ml|toml|cfg|wav|flac|mp3|tar|"
    r"nemo|ckpt|pt|png|svg|html)$"
)
_MOST_FILES = 10_000
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file. name: shown to the user."""

    name: str
    recognises: Callable[[str, bytes], bool]
    read: Callable[[list[Path], Evidence], None]


# A file may be of several kinds: a log may hold stacks. A file that no other reader recognises is a
# log.
_READERS = (
    Reader(
        report_files.KIND, report_files.recognises, report_files.read
    ),  # before stacks, which see more
    Reader(stack_files.KIND, stack_files.recognises, stack_files.read),
    # Of prose: its name alone tells that.
    Reader(stack_files.NOTES, lambda name, head: False, stack_files.read_notes),
    Reader("Flight Recorder dumps", flight_recorder.recognises, flight_recorder.read),
    Reader(traces.KIND, traces.recognises, traces.read),
)
_LOGS = Reader(logs.KIND, logs.recognises, logs.read)


@dataclass
class FoundFiles:
    """Files found, by the reader that recognises them."""

    by_reader: dict[str, list[Path]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)


def find(paths: Sequence[Path]) -> FoundFiles:
    """Look into files and folders. Raises UnreadableError where there is nothing."""
    found = FoundFiles()
    files = [
        (path, file)
        for path in paths
        for file in _of_the_last_attempt(_files(path, found), found)
    ]
    if len(files) > _MOST_FILES:
        found.problems.append(
            f"{len(files)} files; only the first {_MOST_FILES} were looked at"
        )
    for path, file in files[:_MOST_FILES]:
        if file == path or _is_file(file):
            _sort_in(file, path, found)
    return found


def _is_file(file: Path) -> bool:
    """Not a pipe in a folder, which never ends. Who opens a file says why it cannot be."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except OSError:
        return True


def _sort_in(file: Path, given: Path, found: FoundFiles) -> None:
    """Assign a file to its readers. Raises UnreadableError if it was named itself and is
    unreadable.
    """
    try:
        head = _head(file)
    except OSError as error:
        if file == given:
            raise UnreadableError(f"{given}: {error.strerror}") from error
        found.problems.append(safe(f"{file}: {error.strerror}"))
        return
    is_of_torchrun = file != given and file.name.startswith(("stdout", "stderr"))
    if file != given and file.suffix == ".md":
        if dumps.tells(head):
            found.by_reader.setdefault(stack_files.NOTES, []).append(file)
        return
    readers = [reader for reader in _READERS if reader.recognises(str(file), head)]
    # A reader that knows a file by its name says itself what is wrong with it.
    is_of_others = any(one.name != stack_files.KIND for one in readers)
    looks_at = os.path.isfile(file) and not is_of_torchrun and not is_of_others
    if looks_at and (fault := _fault_of(file, head)):
        found.problems.append(safe(f"{file.name}: {fault}"))
    if not readers or (
        {traces.KIND, report_files.KIND}.isdisjoint(one.name for one in readers)
        and logs.recognises(str(file), head)
    ):
        readers.append(_LOGS)
    for reader in readers:
        found.by_reader.setdefault(reader.name, []).append(file)


def _fault_of(file: Path, head: bytes) -> str:
    """What a command that failed, or was ended, leaves: `stacks.pyz > node1.json`. "": nothing."""
    begin = head.lstrip()
    if not begin:
        return "it is empty"
    if file.suffix != ".json":
        return ""
    if begin[:1] not in (b"{", b"["):
        first = begin.split(b"\n", 1)[0][:200].decode("utf-8", "replace")
        return f'no JSON is in it, it begins "{first}"'
    with file.open("rb") as opened:
        opened.seek(max(os.path.getsize(file) - 64, 0))
        is_whole = opened.read().rstrip().endswith((b"}", b"]"))
    return "" if is_whole else "it is cut: its JSON has no end"


def _files(path: Path, found: FoundFiles) -> list[Path]:
    # Path's own raises for a name that is too long.
    if path == logs.STANDARD_INPUT or not os.path.isdir(path):
        return [path]

    def note(error: OSError) -> None:
        found.problems.append(safe(f"{error.filename}: {error.strerror}"))

    files = []
    for folder, folders, names in os.walk(path, onerror=note):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in _FOLDERS_OF_CODE
        ]
        files += [Path(folder, name) for name in names if not _NO_EVIDENCE.search(name)]
    files.sort()
    if not files:
        raise UnreadableError(f"{path}: {'; '.join(found.problems) or 'it is empty'}")
    return files


def _of_the_last_attempt(files: list[Path], found: FoundFiles) -> list[Path]:
    """Leave out the files of earlier attempts, which torchrun --log-dir keeps."""
    attempts = {file: _ATTEMPT.match(str(file)) for file in files}
    last: dict[str, int] = {}
    for told in filter(None, attempts.values()):
        last[told[1]] = max(int(told[2]), last.get(told[1], 0))
    earlier = {
        file: Path(told[0])
        for file, told in attempts.items()
        if told and int(told[2]) < last[told[1]]
    }
    for folder in sorted(set(earlier.values())):
        name = safe(f"{folder.parent.name}/{folder.name}")
        found.earlier.append(
            f"{name}: an earlier attempt, not read; give it to read it"
        )
    return [file for file in files if file not in earlier]


def _head(file: Path) -> bytes:
    """The first bytes; none of a pipe (`diagnose <(COMMAND)`), which can be read only once."""
    if file == logs.STANDARD_INPUT or (
        os.path.exists(file) and not os.path.isfile(file)
    ):
        return b""
    with file.open("rb") as opened:
        return opened.read(_HEAD_BYTES)


def read(found: FoundFiles) -> list[tuple[str, Evidence]]:
    """Each reader's evidence from its files; logs are read first, and tell processes' ranks."""
    parts = []
    pids: dict[int, int] = {}
    for reader in (_LOGS, *_READERS):
        if files := found.by_reader.get(reader.name):
            evidence = Evidence(files={reader.name: files}, rank_of_pid=pids)
            reader.read(files, evidence)
            parts.append((reader.name, evidence))
    return sorted(parts, key=lambda part: part[0] == _LOGS.name)


def joined(
    parts: Sequence[tuple[str, Evidence]],
    problems: Sequence[str] = (),
    earlier: Sequence[str] = (),
) -> Evidence:
    """Join the evidence on one job. A source with another world size than the newest one is listed,
    not joined.
    """
    size = _world_size(parts)
    whole = Evidence(world_size=size, problems=[*problems], earlier=[*earlier])
    for name, part in parts:
        taken = _with_own_groups(part, name, whole.groups)
        if part.world_size not in (0, size) and part.facts:
            taken = Evidence(problems=part.problems, looked_for=part.looked_for)
            taken.earlier = [
                *part.earlier,
                f"{name}: of a job of {part.world_size} ranks, not of {size}: not taken"
                " into account",
            ]
        for field_, theirs in vars(taken).items():
            setattr(whole, field_, _both(getattr(whole, field_), theirs))
    # Of a rank that several sources have, the last one's: a trace's.
    whole.ranks = list({one.rank: one for one in whole.ranks}.values())
    return whole


def _both(mine: Any, theirs: Any) -> Any:
    """Of one field of Evidence, by its type."""
    if isinstance(mine, list):
        return mine + theirs
    return mine | theirs if isinstance(mine, (dict, set)) else mine or theirs


def _with_own_groups(
    part: Evidence, source: str, others: Mapping[str, set[int]]
) -> Evidence:
    """Two sources number the collectives of groups with the same name apart: such a group is
    renamed.
    """
    names = {one: f"{one} of {source}" for one in part.groups.keys() & others.keys()}
    if not names:
        return part
    facts = []
    for fact in part.facts:
        if fact.entry and fact.entry.group in names:
            entry = fact.entry._replace(group=names[fact.entry.group])
            fact = replace(fact, value=entry)
        facts.append(fact)
    return replace(
        part,
        facts=facts,
        groups={names.get(one, one): ranks for one, ranks in part.groups.items()},
        partly_known={names.get(one, one) for one in part.partly_known},
        begins={
            (names.get(one, one), rank): first
            for (one, rank), first in part.begins.items()
        },
    )


def _world_size(parts: Sequence[tuple[str, Evidence]]) -> int:
    """The world size of the newest source that has one; of sources without times, the one with the
    most facts.
    """
    told = [
        (
            max((fact.at for fact in part.facts), default=0.0),
            len(part.facts),
            part.world_size,
        )
        for _, part in parts
        if part.world_size
    ]
    return max(told, default=(0.0, 0, 0))[2]
