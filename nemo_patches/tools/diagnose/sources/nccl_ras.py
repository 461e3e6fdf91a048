"""Reader of NCCL's RAS (from 2.24): how many operations each rank has launched, and which processes do not answer.

Different numbers of operations are usual in a running job; only if they stand still does the job hang. RAS lists the
smaller group of ranks, which may be the one that waits: seats are added only if the listed ranks are behind.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from nemo_patches.stall.judge import Seat
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.facts import Evidence, Fact, Fate, Member
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.verdicts import finding

_PORT = 28028
_LIMIT = timedelta(seconds=30)  # RAS itself waits up to some seconds for a silent process
_AGAIN_AFTER = timedelta(seconds=10)
_MOST_BYTES = 1 << 22
_MOST_RANKS = 1 << 17
_BEGINS = "Job summary"
_TABLE = "Communicators..."
LOOKED_FOR = f"answers of NCCL's RAS, by their lines {_BEGINS!r} and {_TABLE!r}"
_WANTED = f"looked for RAS's lines {_BEGINS!r} and {_TABLE!r}"
_ALLOWED = f"HOST or HOST:PORT is wanted, the port is {_PORT} by default; or a file with what ncclras has printed"
_AGAIN = "Ask again in a while; if the numbers are the same, look at the ranks with the smaller one."
_ANY_KIND = "collective"  # as NCCL 2.24 counts operations

_GROUP = re.compile(r"^ *(\d{1,9}) +\d+ +\S+ +\S+ +(\d{1,9}) +\d+ +([A-Z,]+) +([A-Z,]+) *$", re.MULTILINE)
_COMMUNICATOR = re.compile(r"^(#\d+-\d+) \([0-9a-f]+\) ([A-Z,]+)\n((?:[ \t]+\S.*\n?)*)", re.MULTILINE)
_GPUS = re.compile(r"[0-9]{1,9}")
_DEAD = re.compile(r"^DEAD\n((?:[ \t]+\S.*\n?)*)", re.MULTILINE)
_RANK = re.compile(r"^ *Rank (\d{1,9}) -- (.*)$")
_PROCESS = re.compile(r"process (\d{1,9}) on node (\S{1,255})")
_ONE_GPU = re.compile(r"GPU \d+$")
_MISSING_RANKS = re.compile(r"The missing ranks?: ([\d, -]+)")
_KIND = re.compile(r"different (\w+) operation counts")
_PARTS = re.compile(r"^(?=.*ranks have different)", re.MULTILINE)
_COUNT = re.compile(
    r"^ *(?:Rank )?(\d{1,9})(?: ranks)? (?:has|have) "
    r"(?:launched up to operation (\d{1,18})|not launched any)(?: .*?-- (.*))?"
)


@dataclass
class _Level:
    """Ranks with equal numbers of operations. where: by rank, its GPU and process; empty if RAS does not list them."""

    operation: int
    size: int
    where: dict[int, str] = field(default_factory=dict)


@dataclass
class _Mismatch:
    """For one kind of operation in one communicator. levels: the fewest operations first."""

    communicator: str
    kind: str
    levels: list[_Level]
    lines: tuple[str, ...]

    @property
    def group(self) -> str:
        return f"communicator {self.communicator} {self.kind}".removesuffix(f" {_ANY_KIND}")


@dataclass(frozen=True)
class _Answer:
    """states, sizes: of its groups of communicators, sizes by their numbers. gpus: of the whole job."""

    text: str
    states: tuple[str, ...]
    sizes: dict[str, int]
    gpus: int

    def size_of(self, communicator: str) -> int:
        """How many ranks a communicator has; 0 if it is gone."""
        return self.sizes.get(communicator[1:].partition("-")[0], 0)

    def is_of_all(self, communicator: str) -> bool:
        """Whether its ranks are the job's; a smaller communicator has numbers of its own."""
        return self.size_of(communicator) == self.gpus


def recognises(name: str, head: bytes) -> bool:
    """Whether a file that begins so is an answer of RAS, or several."""
    return _BEGINS.encode() in head and _TABLE.encode() in head


def read(files: list[Path], evidence: Evidence) -> None:
    """Files with what ncclras has printed, once or, better, twice with some time between."""
    for file in files:
        try:
            _read(file, evidence)
        except UnreadableError as error:
            evidence.problems.append(f"{safe(file.name)}: {error}")


def ask(given: str, evidence: Evidence, sleep: Callable[[float], None] = time.sleep) -> None:
    """The value of --ras: a file, or HOST or HOST:PORT of a process, which is asked twice where counts differ.

    Raises UnreadableError.
    """
    try:
        if os.path.isfile(given) or "/" in given:
            _read(Path(given), evidence)
            return
        host, port = _host_and_port(given)
        answers = [_answer(host, port)]
        if "MISMATCH" in answers[0]:
            sleep(_AGAIN_AFTER.total_seconds())
            answers.append(_answer(host, port))
        _add(answers, f"RAS at {safe(given)}", evidence)
    except UnreadableError as error:
        raise UnreadableError(f"--ras={safe(given, 100)}: {error}; {_ALLOWED}") from error


def _read(file: Path, evidence: Evidence) -> None:
    try:
        text = _content(file).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError as error:
        raise UnreadableError(str(error.strerror)) from error
    _add([_BEGINS + answer for answer in text.split(_BEGINS)[1:]], safe(file.name), evidence)


def _host_and_port(address: str) -> tuple[str, int]:
    has_port = address.count(":") == 1 or "]" in address
    host, colon, port = address.rpartition(":") if has_port else (address, "", "")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16
    if (colon and not is_port) or not host.strip("[]"):
        raise UnreadableError("no address")
    return host.strip("[]"), int(port or _PORT)


def _content(path: Path) -> bytes:
    """The file's content; of a pipe, into which nobody may ever write, what comes within the limit."""
    end, data = time.monotonic() + _LIMIT.total_seconds(), b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while len(data) < _MOST_BYTES and select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (more := os.read(descriptor, 1 << 16)):
                break
            data += more
    finally:
        os.close(descriptor)
    return data


def _answer(host: str, port: int) -> str:
    end, data = time.monotonic() + _LIMIT.total_seconds(), b""
    try:
        with socket.create_connection((host, port), 5.0) as client:
            client.sendall(b"verbose status\n")
            while len(data) < _MOST_BYTES and (left := end - time.monotonic()) > 0:
                client.settimeout(left)
                if not (more := client.recv(1 << 16)):
                    break
                data += more
    except (OSError, UnicodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "no host can have that name"
        raise UnreadableError(f"{why}; RAS is in NCCL from 2.24, unless NCCL_RAS_ENABLE=0") from error
    text = data.decode("utf-8", "replace")
    if _BEGINS not in text or _TABLE not in text:
        raise UnreadableError(f"what answers is not NCCL's RAS, or has not told all; {_WANTED}")
    return text


def _add(texts: list[str], cite: str, evidence: Evidence) -> None:
    """Add the facts of the last of several answers of one RAS. Raises UnreadableError if it is no answer of RAS."""
    answer = _parsed(texts[-1] if texts else "")
    facts = len(evidence.facts)
    found = _dead(answer, cite, evidence)
    found += _silent(answer, {fact.rank for fact in evidence.facts[facts:]})
    found += _counts(texts, answer, cite, evidence)
    states, is_fine = ", ".join(answer.states), all(state.endswith(" OK") for state in answer.states)
    if not found and len(evidence.facts) == facts and not is_fine:
        raise UnreadableError(f"RAS reports {states}, in words that are not known here: read it yourself")
    evidence.findings += found
    evidence.world_size = max(evidence.world_size, answer.gpus)
    evidence.summary.append(f"NCCL's RAS tells of {len(answer.sizes)} groups of communicators: {states}.")


def _parsed(text: str) -> _Answer:
    groups = list(_GROUP.finditer(text))
    if not groups:
        raise UnreadableError(f"no table of communicators in it; {_WANTED}")
    sizes = {match[1]: int(match[2]) for match in groups}
    totals = [line.split()[-1] for line in text.partition(_TABLE)[0].splitlines() if line.split()]
    gpus = max([*sizes.values(), *(int(total) for total in totals[-1:] if _GPUS.fullmatch(total))])
    return _Answer(text, tuple(sorted({f"{match[3]} {match[4]}" for match in groups})), sizes, gpus)


def _lines(block: str) -> tuple[str, ...]:
    return tuple(safe(line.strip()) for line in block.splitlines() if line.strip())


def _dead(answer: _Answer, cite: str, evidence: Evidence) -> list[Finding]:
    """RAS lists dead processes. Their ranks are known if as many ranks of a communicator of the whole job lack data."""
    lines = [line for match in _DEAD.finditer(answer.text) for line in _lines(match[1])[1:]]
    if not lines:
        return []
    text = f"NCCL's RAS has not reached it for 60 s: {'; '.join(lines)}"
    ranks = {rank for one in _without_data(answer) if answer.is_of_all(one.communicator) for rank in one.ranks}
    if len(ranks) != len(lines) or not all(_ONE_GPU.search(line) for line in lines):
        return [finding(ids.KILLED, f"{text}. It was killed or has crashed, or its host is gone.", (), lines)]
    evidence.facts += (
        Fact(rank, Fate(fates.GONE, text, details=tuple(lines)), cite, own=False) for rank in sorted(ranks)
    )
    return []


@dataclass(frozen=True)
class _Silent:
    """Ranks of which a communicator has no data."""

    communicator: str
    ranks: tuple[int, ...]
    lines: tuple[str, ...]


def _without_data(answer: _Answer) -> list[_Silent]:
    found = []
    for match in _COMMUNICATOR.finditer(answer.text):
        block = _PARTS.split(match[3])[0]  # who is listed after that has data
        lines, size = _lines(block), answer.size_of(match[1])
        if "INCOMPLETE" not in match[2] or not lines:
            continue
        ranks = [int(rank[1]) for line in lines if (rank := _RANK.match(line))]
        for listed in _MISSING_RANKS.findall(block):
            ranks += _ranks(listed)
        if size:
            found.append(_Silent(match[1], tuple(sorted({rank for rank in ranks if rank < size})), lines))
    return found


def _silent(answer: _Answer, known: set[int]) -> list[Finding]:
    """known: ranks that RAS has other facts on."""
    return [
        finding(
            ids.SILENT,
            f"NCCL's RAS has no data of {_who(one.ranks)} of communicator {one.communicator}: stopped, killed, its "
            "host unreachable; or it has just finished with it. Ask again: after 60 s RAS calls it dead.",
            one.ranks if answer.is_of_all(one.communicator) else (),
            one.lines,
            severity=WARNING,
        )
        for one in _without_data(answer)
        if not (answer.is_of_all(one.communicator) and known.issuperset(one.ranks))
    ]


def _counts(texts: list[str], answer: _Answer, cite: str, evidence: Evidence) -> list[Finding]:
    """Add seats if the ranks that are behind are known; else return findings on the numbers."""
    before = _mismatches(texts[-2]) if len(texts) > 1 else []
    now = _mismatches(answer.text)
    found = []
    for one in now:
        behind, stands = one.levels[0], one in before
        others = [each.levels for each in now if each.communicator == one.communicator and each is not one]
        is_out_of_step = any(_is_ahead(rank, levels) for rank in behind.where for levels in others)
        is_smaller = bool(behind.where) and 2 * behind.size < sum(level.size for level in one.levels)
        if stands and is_smaller and not is_out_of_step:
            if answer.is_of_all(one.communicator):
                _seat(one, answer, cite, evidence)
            else:
                found.append(finding(ids.MISSING_RANK, f"{_told(one)}, and the numbers stand still.", (), one.lines))
            continue
        step = "Of another kind the same ranks are ahead: they are in different collectives. " if is_out_of_step else ""
        if stands:
            text = f"{_told(one)}. The numbers stand still. Those with the larger number wait. {step}None is accused."
            found.append(finding(ids.OUT_OF_STEP, text, (), one.lines, severity=WARNING))
        else:
            text = f"{_told(one)}. In a job that runs such a difference passes. {step}None is accused."
            found.append(finding(ids.NOT_ENOUGH, text, (), one.lines, next_step=_AGAIN))
    return found


def _seat(one: _Mismatch, answer: _Answer, cite: str, evidence: Evidence) -> None:
    """Each rank is in the operation that it has launched last: RAS does not show completed ones."""
    listed = {rank: (level.operation, where) for level in one.levels for rank, where in level.where.items()}
    unlisted = [level.operation for level in one.levels if not level.where]
    silent = {rank for each in _without_data(answer) if each.communicator == one.communicator for rank in each.ranks}
    kind = "" if one.kind == _ANY_KIND else one.kind
    rest = set(range(min(answer.gpus, _MOST_RANKS))) - listed.keys() - silent if unlisted else set()
    for rank, (operation, where) in sorted((listed | dict.fromkeys(rest, (min(unlisted, default=0), ""))).items()):
        evidence.groups.setdefault(one.group, set()).add(rank)
        evidence.begins[one.group, rank] = one.levels[0].operation
        if operation:
            evidence.facts.append(Fact(rank, Seat(rank, one.group, operation, kind, done=None), cite, own=False))
        if process := _PROCESS.search(where):
            member = Member(answer.gpus, pid=int(process[1]))
            evidence.facts.append(Fact(rank, member, cite, host=safe(process[2]), own=False))


def _told(one: _Mismatch) -> str:
    parts = [
        f"{_who(level.where, level.size)} of communicator {one.communicator} launched up to {one.kind} operation "
        f"{level.operation}"
        for level in (one.levels[0], one.levels[-1])
    ]
    return ", ".join(parts)


def _mismatches(text: str) -> list[_Mismatch]:
    found = []
    for block in _COMMUNICATOR.finditer(text):
        for part in _PARTS.split(block[3]):  # one for each kind of operation
            lines = _lines(part)
            kind = next((match[1] for line in lines if (match := _KIND.search(line))), "")
            levels = _levels(lines)
            if "MISMATCH" in block[2] and kind and len(levels) > 1:
                found.append(_Mismatch(block[1], kind, levels, lines))
    return found


def _is_ahead(rank: int, levels: list[_Level]) -> bool:
    if levels[0].where:
        return rank not in levels[0].where
    return any(rank in level.where for level in levels[1:])


def _levels(lines: tuple[str, ...]) -> list[_Level]:
    """The fewest operations first."""
    levels: list[_Level] = []
    for line in lines:
        if count := _COUNT.match(line):
            is_one = line.startswith("Rank ")
            levels.append(_Level(int(count[2] or 0), 1 if is_one else int(count[1])))
            if is_one:
                levels[-1].where[int(count[1])] = count[3] or ""
        elif levels and (rank := _RANK.match(line)):
            levels[-1].where[int(rank[1])] = rank[2]
    return sorted(levels, key=lambda level: level.operation)


def _ranks(listed: str) -> list[int]:
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", listed):
        ranks += range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1)
    return ranks


def _who(ranks: Iterable[int], size: int = 0) -> str:
    listed = sorted(ranks)
    return named(listed) if listed else f"{size} ranks, which it does not list," if size else "ranks"
