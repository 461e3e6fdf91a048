"""What NCCL's RAS (from 2.24) tells of a job: which processes are dead or silent, and which ranks are behind.

That ranks have launched different numbers of operations is usual in a job that runs; only if the same numbers come
again later does the job hang. RAS lists the smaller group of ranks, which may be the one that waits.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose.findings import CRITICAL, NOTE, WARNING, Finding, Report
from nemo_patches.tools.diagnose.folder import UnreadableError, is_port

DEAD, NO_DATA, BEHIND, DIFFERENT_COUNTS = "ras-dead", "ras-no-data", "ras-behind", "ras-different-counts"
_PORT = 28028
_LIMIT = timedelta(seconds=30)  # RAS itself waits up to some seconds for a silent process
_AGAIN_AFTER = timedelta(seconds=10)
_MOST_BYTES = 1 << 22
_BEGINS = "Job summary"
_JOB = "job"  # beside the groups' numbers: how many GPUs the job has
_WANTED = f"looked for RAS's lines {_BEGINS!r} and 'Communicators...'"
_ALLOWED = f"HOST or HOST:PORT is wanted, the port is {_PORT} by default; or a file with what ncclras has printed"
_AGAIN = "Ask again in a while; if the numbers are the same, look at the ranks with the smaller one."
_NEXT = "Look at what it does: `py-spy dump --pid PID` on its host, and the end of its stderr."

_GROUP = re.compile(r"^ *(\d{1,9}) +\d+ +\S+ +\S+ +(\d{1,9}) +\d+ +([A-Z,]+) +([A-Z,]+) *$", re.MULTILINE)
_COMMUNICATOR = re.compile(r"^(#\d+-\d+) \([0-9a-f]+\) ([A-Z,]+)\n((?:[ \t]+\S.*\n?)*)", re.MULTILINE)
_GPUS = re.compile(r"[0-9]{1,9}")
_DEAD = re.compile(r"^DEAD\n((?:[ \t]+\S.*\n?)*)", re.MULTILINE)
_RANK = re.compile(r"^ *Rank (\d{1,9}) -- (.*)$")
_MISSING_RANKS = re.compile(r"The missing ranks?: ([\d, -]+)")
_KIND = re.compile(r"different (\w+) operation counts")
_PARTS = re.compile(r"^(?=.*ranks have different)", re.MULTILINE)
_COUNT = re.compile(
    r"^ *(?:Rank )?(\d{1,9})(?: ranks)? (?:has|have) "
    r"(?:launched up to operation (\d{1,18})|not launched any)(?: .*?-- (.*))?"
)


@dataclass
class _Level:
    """Ranks that have launched as many operations. ranks: empty where RAS lists none."""

    operation: int
    size: int
    ranks: list[int] = field(default_factory=list)
    where: list[str] = field(default_factory=list)


@dataclass
class _Mismatch:
    """Of one kind of operation in one communicator. levels: those that have launched the fewest first."""

    communicator: str
    kind: str
    levels: list[_Level]
    lines: tuple[str, ...]


def is_ras(path: Path) -> bool:
    """Whether a file is an answer of RAS, or several."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return False
    return _BEGINS in head and "Communicators..." in head


def diagnose_saved(path: str | Path) -> Report:
    """A file with what ncclras has printed, once or, better, twice with some time between. Raises UnreadableError."""
    try:
        text = _content(path).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    return _report(str(path), [_BEGINS + answer for answer in text.split(_BEGINS)[1:]])


def diagnose_ras(given: str) -> Report:
    """The value of --ras: where RAS is, or a file with what it has told. Raises UnreadableError."""
    if not os.path.isfile(given) and "/" not in given:
        return ask(given)
    try:
        return diagnose_saved(given)
    except UnreadableError as error:
        raise UnreadableError(f"--ras={error}; {_ALLOWED}") from error


def _content(path: str | Path) -> bytes:
    """Of a pipe what comes within the limit: nobody may ever write into it."""
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


def ask(address: str, sleep: Callable[[float], None] = time.sleep) -> Report:
    """The RAS of a process at HOST or HOST:PORT; where counts differ, asked twice. Raises UnreadableError."""
    host, colon, port = address.rpartition(":") if address.count(":") == 1 or "]" in address else (address, "", "")
    if (colon and not is_port(port)) or not host.strip("[]"):
        raise UnreadableError(f"--ras={safe(address, 100)}: {_ALLOWED}")
    answers = [_answer(address, host.strip("[]"), int(port or _PORT))]
    if "MISMATCH" in answers[0]:
        sleep(_AGAIN_AFTER.total_seconds())
        answers.append(_answer(address, host.strip("[]"), int(port or _PORT)))
    return _report(address, answers)


def _answer(address: str, host: str, port: int) -> str:
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
        hint = f"RAS is in NCCL from 2.24, unless NCCL_RAS_ENABLE=0; {_ALLOWED}"
        raise UnreadableError(f"--ras={address}: {why}; {hint}") from error
    text = data.decode("utf-8", "replace")
    if _BEGINS not in text or "Communicators..." not in text:
        raise UnreadableError(f"--ras={address}: what answers is not NCCL's RAS, or has not told all; {_WANTED}")
    return text


def _report(source: str, answers: list[str]) -> Report:
    groups = list(_GROUP.finditer(answers[-1])) if answers else []
    if not groups:
        raise UnreadableError(f"{source}: no table of communicators in it; {_WANTED}")
    sizes = {match[1]: int(match[2]) for match in groups}
    totals = [line.split()[-1] for line in answers[-1].partition("Communicators...")[0].splitlines() if line.split()]
    sizes[_JOB] = max([*sizes.values(), *(int(total) for total in totals[-1:] if _GPUS.fullmatch(total))])
    findings = [*_dead(answers[-1]), *_silent(answers[-1], sizes), *_behind(answers, sizes)]
    order = (DEAD, NO_DATA, BEHIND, DIFFERENT_COUNTS)
    findings.sort(key=lambda finding: order.index(finding.id))
    states = ", ".join(sorted({f"{match[3]} {match[4]}" for match in groups}))
    fine = f"Nothing found: NCCL's RAS tells of {len(groups)} groups of communicators: {states}."
    if any(match[4] != "OK" for match in groups) and not findings:
        raise UnreadableError(f"{source}: RAS reports {states}, in words that are not known here: read it yourself")
    return Report(
        folder=safe(source),
        world_size=sizes[_JOB],
        moving=False,
        verdict=findings[0].text if findings else fine,
        next_step=findings[0].next_step if findings else "",
        findings=tuple(findings),
        ranks=(),
        problems=(),
        earlier=(),
    )


def _lines(block: str) -> tuple[str, ...]:
    return tuple(safe(line.strip()) for line in block.splitlines() if line.strip())


def _dead(answer: str) -> list[Finding]:
    return [
        Finding(
            DEAD,
            CRITICAL,
            (),
            "NCCL's RAS has not reached it for 60 s: it was killed or has crashed, or its host is gone: "
            + "; ".join(lines),
            "Look for an out-of-memory kill on that host, and at the end of that process's stderr.",
            evidence=lines,
        )
        for match in _DEAD.finditer(answer)
        if (lines := _lines(match[1])[1:])
    ]


def _silent(answer: str, sizes: dict[str, int]) -> list[Finding]:
    findings = []
    for match in _COMMUNICATOR.finditer(answer):
        lines = _lines(match[3])
        size = sizes.get(match[1][1:].partition("-")[0], 0)
        if "INCOMPLETE" not in match[2] or not lines or not size:  # 0: nobody has that communicator any more
            continue
        ranks = [int(rank[1]) for line in lines if (rank := _RANK.match(line))]
        for listed in _MISSING_RANKS.findall(match[3]):
            ranks += _ranks(listed)
        ranks = [rank for rank in ranks if rank < size]
        findings.append(
            Finding(
                NO_DATA,
                WARNING,
                _global(ranks, match[1], sizes),
                f"NCCL's RAS has no data of {_who(ranks)} of communicator {match[1]}: stopped, killed, its host "
                "unreachable; or it has just finished with that communicator. Ask again: after 60 s RAS calls it dead.",
                _NEXT,
                evidence=lines,
            )
        )
    return findings


def _behind(answers: list[str], sizes: dict[str, int]) -> list[Finding]:
    findings = []
    before = _mismatches(answers[-2]) if len(answers) > 1 else []
    now = _mismatches(answers[-1])
    for mismatch in now:
        last, top = mismatch.levels[0], mismatch.levels[-1]
        stands = mismatch in before
        of_others = [one.levels for one in now if one.communicator == mismatch.communicator and one is not mismatch]
        out_of_step = any(_is_ahead(rank, levels) for rank in last.ranks for levels in of_others)
        told = (
            f"{_who(last.ranks, last.size)} of communicator {mismatch.communicator} launched up to {mismatch.kind} "
            f"operation {last.operation}, {_who(top.ranks, top.size)} up to {top.operation}"
        )
        at = f" ({'; '.join(last.where[:4])})" if last.where else ""
        if stands and last.ranks and 2 * last.size < sum(level.size for level in mismatch.levels) and not out_of_step:
            text = f"{told}, and the numbers stand still: the others wait for {_who(last.ranks)}{at}."
            ranks = _global(last.ranks, mismatch.communicator, sizes)
            findings.append(Finding(BEHIND, CRITICAL, ranks, text, _NEXT, evidence=mismatch.lines))
            continue
        still = "The numbers stand still: the job hangs." if stands else "In a job that runs such a difference passes."
        step = "of another kind the same ranks are ahead: they are in different collectives; " if out_of_step else ""
        text = f"{told}{at}. {still} Those with the larger number wait; {step}none is accused."
        severity = WARNING if stands else NOTE
        findings.append(Finding(DIFFERENT_COUNTS, severity, (), text, _AGAIN, evidence=mismatch.lines))
    return findings


def _mismatches(answer: str) -> list[_Mismatch]:
    found = []
    for block in _COMMUNICATOR.finditer(answer):
        for part in _PARTS.split(block[3]):  # one for each kind of operation
            lines = _lines(part)
            kind = next((match[1] for line in lines if (match := _KIND.search(line))), "")
            levels = _levels(lines)
            if "MISMATCH" in block[2] and kind and len(levels) > 1:
                found.append(_Mismatch(block[1], kind, levels, lines))
    return found


def _is_ahead(rank: int, levels: list[_Level]) -> bool:
    if levels[0].ranks:
        return rank not in levels[0].ranks
    return any(rank in level.ranks for level in levels[1:])


def _levels(lines: tuple[str, ...]) -> list[_Level]:
    """Those that have launched the fewest first."""
    levels: list[_Level] = []
    for line in lines:
        if count := _COUNT.match(line):
            one = line.startswith("Rank ")
            levels.append(_Level(int(count[2] or 0), 1 if one else int(count[1])))
            if one:
                levels[-1].ranks, levels[-1].where = [int(count[1])], [count[3] or ""]
        elif levels and (rank := _RANK.match(line)):
            levels[-1].ranks.append(int(rank[1]))
            levels[-1].where.append(rank[2])
    return sorted(levels, key=lambda level: level.operation)


def _ranks(listed: str) -> list[int]:
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", listed):
        ranks += range(int(first), min(int(last or first), int(first) + (1 << 16)) + 1)
    return ranks


def _who(ranks: list[int], size: int = 0) -> str:
    return named(sorted(ranks)) if ranks else f"{size} ranks, which it does not list," if size else "ranks"


def _global(ranks: list[int], communicator: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The ranks of the job, if the communicator is of the whole job; a smaller one numbers its own."""
    size = sizes.get(communicator[1:].partition("-")[0])
    return tuple(sorted(ranks)) if size == sizes[_JOB] else ()
