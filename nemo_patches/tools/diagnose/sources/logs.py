"""Training logs: facts from the lines of torch, its launchers, Python and nemo_patches.

A log may be of any size, one of many in a folder, with colours, prefixes, several ranks' lines
mixed, and lines that a terminal has wrapped. A fact cites its file and line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.rank_facts import (
    ALL_WELL,
    NOT_TOLD,
    Evidence,
    UnreadableError,
)
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps
from nemo_patches.tools.diagnose.sources.launch_lines import Launch
from nemo_patches.tools.diagnose.sources.lines import (
    Line,
    Prefixes,
    goes_on,
    messages,
    pieces,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.rows import (
    FILTER,
    FILTER_BEYOND_ASCII,
    FINISHED,
    is_whole,
)

LOOKED_FOR = (
    "the NCCL watchdog's time-outs and heartbeat, desync reports, fr_trace's output,"
    " Gloo's errors, the store's time-outs at start-up, tables and lines of torchrun,"
    " DeepSpeed, Ray, Slurm, mpirun and kubectl, exceptions and CUDA errors that ended a rank,"
    " kills for want of memory, tables with a row for each rank, nemo_patches' own lines"
)
KIND = "logs"
STANDARD_INPUT = Path("-")
_BLOCK_BYTES = 1 << 20
_OTHER_FORMATS = (
    b"\x1f\x8b",
    b"\xfd7zXZ\0",
    b"BZh",
    b"\x28\xb5\x2f\xfd",
    b"PK\3\4",
    b"\xff\xfe",
    b"\xfe\xff",
)
_NAMES = re.compile(
    r"\.(?:log|out|err|stderr|stdout|txt)(?:\.\d+)?$|^(?:stderr|stdout|slurm)\b",
    re.IGNORECASE,
)
_ATTEMPT = re.compile(r"attempt_\d{1,6}")
# rank_3.log; NeMo's nemo_log_globalrank-3_localrank-3.txt. A node's has the lines of its ranks.
_RANK_IN_NAME = re.compile(
    r"(?<!node)(?<!node[-_.])rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE
)

# That are looked at where they, or those before them, hold such a word.
_PART_BYTES = 1 << 13
_FEW_LINES = 32  # of a launch that did not come to its first step
# Before a rank's lines: no word of interest by itself
_RANKS_LABEL = re.compile(rb"^\[rank[ _-]?\d{1,7}\]", re.MULTILINE)
_PROCESSES = re.compile(r"Starting with \d{1,7} processes")
# A launch follows another one: as what restarts it says, or as typed behind a shell's prompt
_RESTARTS = re.compile(
    r"will restart worker group|"
    r"^(?:.{0,80}[\]:|>-] ?)?[Rr]e-?(?:start|launch)ing (?:the )?"
    r"(?:training|job|run|workers?(?: group)?|ranks)\b(?! (?:process|thread|\d|if|when|with))"
)
_TYPED = re.compile(
    r"^\S{0,80} ?[$#%\u276f] (?:\w+=\S* )*"
    r"(?:torchrun|accelerate launch|deepspeed|python\S* |srun|mpirun|bash |sh |\./)"
)


def recognises(name: str, head: bytes) -> bool:
    """Whether a file may be a log, by its name or its first bytes: the lines of interest may be at
    its very end.
    """
    if b"\0" in head[:4096] or head.startswith(_OTHER_FORMATS):
        return False
    return _NAMES.search(Path(name).name) is not None or _tells(head)


def read(files: list[Path], evidence: Evidence) -> None:
    """Add the facts of logs, or of "-", standard input; of several launches the last one counts.

    Raises UnreadableError where there is but one file, and it cannot be read.
    """
    problems = len(evidence.problems)
    reading = _read(files, evidence, files[0] if len(files) == 1 else None)
    # What comes through a pipe can be read only once.
    if len(reading.restarted) == 1 and all(map(os.path.isfile, files)):
        [first] = reading.restarted
        del evidence.problems[problems:]
        others = [file for file in files if file != first]
        reading = _read([first, *others], evidence, first)
    reading.finish()


def _read(files: list[Path], evidence: Evidence, whole: Path | None) -> _Reading:
    """whole: the file in which a launch that begins ends the one before: no other has launches."""
    reading = _Reading(evidence)
    in_names = {
        file: int(found[1])
        for file in files
        if (found := _RANK_IN_NAME.search(file.name))
    }
    if len(set(in_names.values())) < max(len(in_names), 2):
        in_names = {}  # of several hosts, or of one file, which may have all ranks' lines
    for file in files:
        try:
            rank = in_names.get(file, NOT_TOLD)
            reading.read(file, rank, alone=file == whole)
        except UnreadableError as error:
            if len(files) == 1:
                raise
            evidence.problems.append(safe(str(error)))
    return reading


class _Reading:
    """All files of one job."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._launch = Launch()
        # The last earlier launch with any facts.
        self._before: tuple[LaunchFacts, Evidence] | None = None
        self._launches = 0  # begun in the one file
        self._telling = 0  # of them, those that tell anything
        self._begun = 0  # likewise in another one
        self.restarted: set[Path] = set()  # of others, where launches follow launches
        self._facts = 0  # of the one file's present launch, so far
        self._steps = Steps()  # since the last of them
        self._has_gone_on = False
        self._has_no_end = False  # the last file's last line
        self._names: dict[str, Path] = {}
        # By local rank, torchrun's folder, one for each host.
        self._runs: dict[int, Path] = {}

    def read(self, path: Path, in_name: int, alone: bool) -> None:
        """in_name: the rank in the file's name, or NOT_TOLD.

        alone: no other file has several launches, so one that begins in it ends the one before.
        """
        self._launch.begin_file()
        self._begun = 0
        name, of_folder = self._name_of(path), _rank_of_folder(path)
        rank = max(of_folder, in_name)
        if of_folder >= 0:
            run = path.parent.parent.parent
            self._launch.found.several_hosts |= self._runs.setdefault(rank, run) != run
        try:
            with (
                nullcontext(sys.stdin.buffer)
                if path == STANDARD_INPUT
                else path.open("rb")
            ) as file:
                start = file.peek(_BLOCK_BYTES)[:_BLOCK_BYTES]  # type: ignore[union-attr]  # of a buffered reader
                if start.startswith(_OTHER_FORMATS):
                    raise UnreadableError(
                        f"{path}: compressed, or in UTF-16: give its plain text"
                    )
                head = file.read(_BLOCK_BYTES)
                prefixes = Prefixes(head, rank)
                blocks = chain([head], iter(lambda: file.read(_BLOCK_BYTES), b""))
                message = ""
                for number, message in messages(self._lines(blocks), is_whole):
                    text, prefixed, local_rank = prefixes.strip(message)
                    if alone:
                        self._begin_if_told(message, prefixed)
                    elif self._restarts(message, name):
                        self.restarted.add(path)
                    line_rank = local_rank if prefixed is None else prefixed
                    if prefixed is not None:
                        self._launch.ends.note_task(local_rank, prefixed)
                    # The same file's other lines may have no rank but the local one.
                    self._launch.found.several_hosts |= (
                        local_rank >= 0 and line_rank != local_rank
                    )
                    self._launch.take(
                        Line(text, name, number, line_rank, prefixed is not None)
                    )
                    if alone:
                        self._note_steps(text)
                self._launch.found.note_names(prefixes.names)
                if self._has_no_end and goes_on(message, is_whole):
                    text = f"{name}: it is cut: line {number} has no end"
                    self._evidence.problems.append(text)
        except OSError as error:
            self._launch.found.missing_lines = True
            raise UnreadableError(f"{path}: {error.strerror}") from error

    def _name_of(self, path: Path) -> str:
        """Its citation: with enough of its folders to tell it from others."""
        for depth in range(2 if _rank_of_folder(path) >= 0 else 1, len(path.parts) + 1):
            name = safe("/".join(path.parts[-depth:]), 200)
            if self._names.setdefault(name, path) == path:
                return name
        return safe(str(path), 200)

    def _is_next_attempt(self, message: str) -> bool:
        """Of a job that Slurm has requeued: srun and slurmstepd go on after that line."""
        is_slurms = message.startswith(("srun", "slurmstepd"))
        return self._launch.ends.is_requeued and bool(message.strip()) and not is_slurms

    def _restarts(self, message: str, name: str) -> bool:
        """Whether another launch begins in a file, by what is told in it: not what was typed."""
        begins = _PROCESSES.search(message) is not None
        self._begun += begins
        is_again = begins and (self._begun > 1 or self._launch.ends.is_cancelled(name))
        return is_again or _RESTARTS.search(message) is not None

    def _begin_if_told(self, message: str, rank: int | None) -> None:
        """For launches that write into one log, such as Slurm's requeued ones."""
        ends = self._launch.ends
        begins = _PROCESSES.search(message) is not None
        is_next = self._is_next_attempt(message) or (begins and ends.is_to_start_again)
        follows = (
            is_next
            or rank in ends.ended
            or _RESTARTS.search(message) is not None
            or _TYPED.search(message) is not None
            or (
                self._has_gone_on
                and FINISHED.search(message) is not None
                and self._launch.has_trouble
            )
        )
        if not follows and not begins:
            return
        self._launches = max(self._launches, follows) + 1
        if self._launches > 1:
            self._put_aside()
            patched = self._launch.found.patched
            self._launch = Launch()
            self._launch.found.patched = patched
            self._launch.begin_file()
            self._facts, self._has_gone_on = 0, False
            self._steps.begin()
        if is_next:
            self._before = None  # a requeue is not the job's end

    def _note_steps(self, text: str) -> None:
        """Whether the job has gone on since the last that was told of it."""
        facts = len(self._launch.found.facts) + self._launch.tracebacks.count
        if facts != self._facts:
            self._facts, self._has_gone_on = facts, False
            self._steps.begin()
        elif facts or self._before is not None:
            self._has_gone_on = self._steps.go_on(text)

    def _put_aside(self) -> None:
        told = Evidence()
        self._launch.finish(told)
        if self._has_gone_on or self._launch.ends.is_finished:
            self._before = None  # what ended the one before has been overcome
        if self._before is not None and self._launch.never_began(_FEW_LINES):
            return
        if self._launch.found.tells_anything or told.findings:
            self._telling += 1
            self._before = self._launch.found, told

    def finish(self) -> None:
        """Add the facts of the last launch that has any, unless a later one has gone on."""
        self._put_aside()
        found, told = self._before or (self._launch.found, Evidence())
        evidence = self._evidence
        evidence.facts += found.facts.values()
        evidence.groups |= told.groups
        evidence.partly_known |= told.partly_known
        evidence.begins |= told.begins
        evidence.findings += told.findings
        evidence.printed |= told.printed
        evidence.ran_out |= told.ran_out
        evidence.alone |= told.alone
        evidence.cure = found.cure
        evidence.idle |= found.idle
        # Of all readers
        evidence.rank_of_pid.update(found.ranks_of_pids())
        evidence.patched = found.patched
        evidence.world_size = found.world_size
        evidence.looked_for.append(LOOKED_FOR)
        evidence.summary += [
            f"stall reports of the ranks on one host: nemo-patches diagnose {folder}"
            for folder in found.reports
        ]
        if found.patched and not found.tells_anything and not found.reports:
            evidence.summary.append(ALL_WELL)
        if self._telling > 1 or (self._before and found is not self._launch.found):
            text = (
                f"{self._launches} launches in one log: told is of the last one that"
                " tells anything"
            )
            evidence.earlier.append(text)

    def _lines(self, blocks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """The lines near anything of interest, with their numbers, cleaned and bounded; of others
        each rank's last one of a part.
        """
        rest, number = b"", 1
        follows = True  # a file's first lines tell how the job was started
        for block in blocks:
            whole = rest + block
            end = whole.rfind(b"\n") + 1
            rest = whole[end:][-_BLOCK_BYTES:]
            # Most blocks tell nothing; to look at their parts takes a quarter longer.
            if not (follows or self._launch.tracebacks.goes_on or _tells(whole)):
                number += whole.count(b"\n", 0, end)
                continue
            for part in _parts(whole[:end]):
                tells = _tells(_RANKS_LABEL.sub(b"", part))
                lines = part.split(b"\n")[:-1]
                kept: Iterable[int] = range(len(lines))
                if not (tells or follows or self._launch.tracebacks.goes_on):
                    kept = _last_of_each_rank(lines)
                for index in kept:
                    for text in pieces(lines[index]):
                        yield number + index, text
                number += len(lines)
                follows = tells
        self._has_no_end = bool(rest)
        for text in pieces(rest):
            yield number, text


def _tells(part: bytes) -> bool:
    return any(needle in part for needle in FILTER) or (
        not part.isascii() and any(needle in part for needle in FILTER_BEYOND_ASCII)
    )


def _last_of_each_rank(lines: Sequence[bytes]) -> list[int]:
    """Their indices, of the lines that begin with a rank's label."""
    last = {
        line.partition(b"]")[0]: index
        for index, line in enumerate(lines)
        if line.startswith(b"[rank")
    }
    return sorted(last.values())


def _parts(lines: bytes) -> Iterator[bytes]:
    """Whole lines, some at a time."""
    start = 0
    while start < len(lines):
        end = lines.find(b"\n", min(start + _PART_BYTES, len(lines) - 1)) + 1
        yield lines[start:end]
        start = end


def _rank_of_folder(path: Path) -> int:
    """torchrun --log-dir makes RUN/attempt_0/3/stderr.log for local rank 3."""
    folder, attempt = path.parent.name, path.parent.parent.name
    return (
        int(folder)
        if _ATTEMPT.fullmatch(attempt) and re.fullmatch(r"\d{1,6}", folder)
        else NOT_TOLD
    )
