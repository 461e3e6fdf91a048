"""Training logs: facts from the lines of torch, its launchers, Python and nemo_patches.

A log may be of any size, one of many in a folder, with colours, prefixes, several
ranks' lines mixed, and lines that a terminal has wrapped. A fact cites its file and line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.facts import (
    ALL_WELL,
    NOT_TOLD,
    Evidence,
    UnreadableError,
)
from nemo_patches.tools.diagnose.sources.c10d_lines import (
    BARRIER,
    CONNECTING,
    GLOO,
    GLOO_CLOSED,
    STUCK_WATCHDOG,
    C10dLines,
    rank_in,
)
from nemo_patches.tools.diagnose.sources.exception_lines import ExceptionLines
from nemo_patches.tools.diagnose.sources.launcher_lines import (
    DEEPSPEED,
    FAILED_LINE,
    MPIRUN,
    LauncherLines,
)
from nemo_patches.tools.diagnose.sources.lines import Prefixes
from nemo_patches.tools.diagnose.sources.log_facts import (
    MOST_KEPT,
    LaunchFacts,
    Line,
    said,
)
from nemo_patches.tools.diagnose.sources.rows import RowLines
from nemo_patches.tools.diagnose.sources.stall_lines import StallLines

LOOKED_FOR = (
    "the NCCL watchdog's time-outs and heartbeat, desync reports, fr_trace's output,"
    " Gloo's errors, the store's time-outs at start-up, tables and lines of torchrun,"
    " DeepSpeed, Ray, Slurm, mpirun and kubectl, exceptions and CUDA errors that ended a rank,"
    " kills for want of memory, nemo_patches' own lines"
)
KIND = "logs"
STANDARD_INPUT = Path("-")
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 14  # characters that are looked at
_MOST_JOINED = 16  # lines that a terminal may have made of one
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
# What launchers write before each line: torchrun --tee the local rank, mpirun --tag-output and srun
# -l the job's.
_TEE = re.compile(
    r"\[default(\d{1,6})\]: ?|"
    r"\[\d{1,9},(?:mpirank:)?(\d{1,6})(?:,[\w-]{1,80})?\]<std(?:err|out)>: ?"
)
_SRUN_LABEL = re.compile(r"(\d{1,6}): ")
# From such a line on.
_LABELLED = re.compile(r"\d{1,6}: (?:Traceback \(most recent|\[rank\d)")
_ATTEMPT = re.compile(r"attempt_\d{1,6}")
# rank_3.log; NeMo's nemo_log_globalrank-3_localrank-3.txt. A node's has the lines of its ranks.
_RANK_IN_NAME = re.compile(
    r"(?<!node)(?<!node[-_.])rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE
)

# Each line of interest has one of these, or closely follows a line that has one.
_NEEDLES = (
    b"[rank|NCCL|ollective|nemo_patches |Starting with |gloo|arrier|imed out|exit|rank      :|"
    b"oom_kill|oom-kill|CANCELLED|death signal| Killed |TERM_|ut of memory|memory limit|bus error|"
    b"killed |srun: error|terminated with |died|Fatal Python|Traceback (most|pid |due to timeout|"
    b"dump signal|lost communication|Node failure|with PID|Remote daemon|Process name: |"
    b"Duplicate GPU|execve(|pair closure|lagging ranks|inconsistent|Error|gai error|"
    b"eturning from train|raining finished|raining complete|raining done|inished training|"
    b"Trainer.fit` stopped|PBS: job killed|MPI_A|RUNNING AT|EXIT |BY SIGNAL|xit Code|e: memory|"
    b"OOMKilled|EI00|NVRM|NVLink|managed by|blocked for|not responding|mlx5|SIGSEGV|SIGBUS|"
    b"anks have |ank has |issing|talled|stuck|Stuck|hung|is hanging|nresponsive|respond|"
    b"heartbeat|lost |Lost |lagging|Lagging|crash|dead|Dead|segfault|core dumped|aborted|"
    b"unreachable|did not |never |has not |returncode|silent|abnormally|unexpectedly|global timeout"
).split(b"|")
# That are looked at where they, or those before them, hold such a word.
_PART_BYTES = 1 << 13
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NEW_MESSAGE = re.compile(
    r"^\W{0,3}(?:\d+: )?\[(?:rank\d|default\d|E |E\d|W |W\d|I |I\d|F"
    r" )|\[rank\d{1,7}\]:|"
    r"ProcessGroupNCCL\.cpp:\d{1,6}\]|NCCL INFO"
    r"|^(?:slurmstepd[\w.-]{0,80}|srun|prterun|mpirun): |^[EWIF]\d{4} \d\d:|^\d{4}-\d\d-\d\d["
    r" T]\d\d:"
    r"|^(?:frame #\d|Traceback |Fatal Python|Error executing|Exception"
    r" raised)|nemo_patches (?:INFO|WARNING|ERROR) \["
)
_CPP_FRAME = re.compile(r"frame #\d{1,4}: ")
_SEVERAL = re.compile(
    r"(?=\[rank\d{1,7}\]:\[[EFWI])|(?<=[^:])(?=\[[EFWI] ProcessGroupNCCL)"
)  # processes' in a line
_QUOTED = re.compile(r"^(?:> ?){1,8}")
_RESTARTS = "will restart worker group"  # torchrun's
_PROCESSES = re.compile(r"Starting with (\d{1,7}) processes")
_TELL_OF_AN_END = re.compile(
    r"collective operation timeout|timed out in blocking wait|closing signal SIG|dump signal|"
    r"monitoredBarrier|failed \(exitcode|first observed failure|exits with return code"
)


def recognises(name: str, head: bytes) -> bool:
    """Whether a file may be a log, by its name or its first bytes: the lines of interest may be at
    its very end.
    """
    if b"\0" in head[:4096] or head.startswith(_OTHER_FORMATS):
        return False
    return _NAMES.search(Path(name).name) is not None or any(
        needle in head for needle in _NEEDLES
    )


def read(files: list[Path], evidence: Evidence) -> None:
    """Add the facts of logs, or of "-", standard input; of several launches the last one counts.

    Raises UnreadableError where there is but one file, and it cannot be read.
    """
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
            reading.read(file, rank, alone=len(files) == 1)
        except UnreadableError as error:
            if len(files) == 1:
                raise
            evidence.problems.append(safe(str(error)))
    reading.finish()


class _Launch:
    """What the lines of one launch tell."""

    def __init__(self) -> None:
        self.found = LaunchFacts()
        self.c10d = C10dLines(self.found)
        self.launcher = LauncherLines(self.found)
        self.exceptions = ExceptionLines(self.found)
        self.stalls = StallLines(self.found)
        self.rows = RowLines(self.found)
        # For each file, the ranks that its lines are from.
        self.by_file: list[set[int]] = []

    def begin_file(self) -> None:
        self.found.is_over = False
        self.by_file.append(set())

    def take(self, line: Line) -> None:
        found, text = self.found, line.text
        if "x across cluster]" in text:
            found.missing_lines = True
        if "Starting with" in text and (processes := _PROCESSES.search(text)):
            found.has_size(processes[1])
        found.note_pid(text)
        if line.has_prefix and len(self.by_file[-1]) < MOST_KEPT:
            self.by_file[-1].add(line.rank)
        found.is_over = found.is_over or _TELL_OF_AN_END.search(text) is not None
        if "nemo_patches" in text:
            self.stalls.take(line)
        before = len(found.facts)
        self.c10d.take(line)
        is_known = self.launcher.take(line)
        self.exceptions.take(line)
        self.rows.take(line)
        if (
            not is_known
            and len(found.facts) == before
            and not self.exceptions.is_reading
        ):
            self.rows.take_words(line)

    def finish(self, evidence: Evidence) -> None:
        self.stalls.finish()
        self.launcher.finish()
        self.exceptions.finish()
        self.rows.finish()
        self.launcher.leave_out_woken()
        self.found.leave_out_lines_of_ranks()
        self.c10d.finish(evidence, self.by_file)
        not_told = self.found.without_local_ranks()
        for ranks in evidence.groups.values():
            ranks -= not_told


class _Reading:
    """All files of one job."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._launch = _Launch()
        # The last earlier launch with any facts.
        self._before: tuple[LaunchFacts, Evidence] | None = None
        self._launches = 0  # begun in the one file
        self._names: dict[str, Path] = {}
        # By local rank, torchrun's folder, one for each host.
        self._runs: dict[int, Path] = {}

    def read(self, path: Path, in_name: int, alone: bool) -> None:
        """in_name: the rank in the file's name, or NOT_TOLD.

        alone: no other file is read, so a launch that begins in it ends the one before.
        """
        self._launch.begin_file()
        self._launches = 0
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
                labels = _TEE
                head = file.read(_BLOCK_BYTES)
                prefixes = Prefixes(head)
                blocks = chain([head], iter(lambda: file.read(_BLOCK_BYTES), b""))
                for number, message in _messages(self._lines(blocks)):
                    if alone and self._is_next_attempt(message):
                        self._launches = max(self._launches, 1)
                        self._begin_launch()
                        self._before = None  # a requeue is not the job's end
                    elif alone and _PROCESSES.search(message):
                        self._begin_launch()
                    labels = _SRUN_LABEL if _LABELLED.match(message) else labels
                    message, labelled = prefixes.strip(message)
                    prefixed, tee = rank_in(message), labels.match(message)
                    if prefixed is None and tee is None and labelled >= 0:
                        prefixed = labelled
                    local_rank = int(tee[tee.lastindex or 1]) if tee else rank
                    line_rank = local_rank if prefixed is None else prefixed
                    message = message[tee.end() :] if tee else message
                    if alone and (
                        _RESTARTS in message or prefixed in self._launch.launcher.ended
                    ):
                        self._launches = max(self._launches, 1)
                        self._begin_launch()
                    # The same file's other lines may have no rank but the local one.
                    self._launch.found.several_hosts |= (
                        local_rank >= 0 and line_rank != local_rank
                    )
                    self._launch.take(
                        Line(message, name, number, line_rank, prefixed is not None)
                    )
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
        return (
            self._launch.launcher.is_requeued
            and bool(message.strip())
            and not is_slurms
        )

    def _begin_launch(self) -> None:
        """For launches that write into one log, such as Slurm's requeued ones."""
        self._launches += 1
        if self._launches > 1:
            self._put_aside()
            patched = self._launch.found.patched
            self._launch = _Launch()
            self._launch.found.patched = patched
            self._launch.begin_file()

    def _put_aside(self) -> None:
        told = Evidence()
        self._launch.finish(told)
        if self._launch.found.tells_anything:
            self._before = self._launch.found, told

    def finish(self) -> None:
        """Add the facts of the last launch that has any."""
        earlier, self._before = self._before, None
        self._put_aside()
        found, told = self._before or earlier or (self._launch.found, Evidence())
        evidence = self._evidence
        evidence.facts += found.facts.values()
        for group, ranks in told.groups.items():
            evidence.groups.setdefault(group, set()).update(ranks)
        evidence.begins.update(told.begins)
        evidence.partly_known |= told.partly_known
        evidence.patched = evidence.patched or found.patched
        evidence.world_size = max(evidence.world_size, found.world_size)
        evidence.looked_for.append(LOOKED_FOR)
        evidence.summary += [
            f"stall reports of the ranks on one host: nemo-patches diagnose {folder}"
            for folder in found.reports
        ]
        if found.patched and not found.tells_anything and not found.reports:
            evidence.summary.append(ALL_WELL)
        if self._launches > 1:
            text = (
                f"{self._launches} launches in one log: told is of the last one that"
                " tells anything"
            )
            evidence.earlier.append(text)

    def _lines(self, blocks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """The lines near anything of interest, with their numbers, cleaned and bounded."""
        rest, number, follows = b"", 1, False
        for block in blocks:
            whole = rest + block
            end = whole.rfind(b"\n") + 1
            rest = whole[end:][-_BLOCK_BYTES:]
            # Most blocks tell nothing; to look at their parts takes a quarter longer.
            if not (follows or self._launch.exceptions.is_reading or _tells(whole)):
                number += whole.count(b"\n", 0, end)
                continue
            for part in _parts(whole[:end]):
                tells = _tells(part)
                if tells or follows or self._launch.exceptions.is_reading:
                    for line in part.split(b"\n")[:-1]:
                        for text in _pieces(line):
                            yield number, text
                        number += 1
                else:
                    number += part.count(b"\n")
                follows = tells
        for text in _pieces(rest):
            yield number, text


def _tells(part: bytes) -> bool:
    return any(needle in part for needle in _NEEDLES)


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


def _pieces(line: bytes) -> Iterator[str]:
    """Split what progress bars, or processes that write at once, have put into one line."""
    text = said(line.decode("utf-8", "replace").rstrip("\r"))
    for part in text.replace("\r", "\n").split("\n"):
        text = _COLOURS.sub("", part[: 4 * _LONGEST_LINE])[:_LONGEST_LINE].rstrip()
        text = _QUOTED.sub("", text)
        if text.count("ProcessGroupNCCL") > 1:
            yield from _SEVERAL.split(text)
        else:
            yield text


# A message that a terminal may have wrapped
_BEGINS = re.compile(
    r"ProcessGroupNCCL|Watchdog caught|last enqueued|gloo/|failed \(exitcode|Detected mismatch|"
    r"watchdog thread|store based barrier|client socket has timed|is setting up NCCL|"
    r"sigkill_handler\] \[|with PID|\[Rank$"
)
_WHOLE = re.compile(
    r"timing out$|ng out\.$|before timing out|timed out in blocking wait|with code -?\d+\.|"
    r"last ?completed ?(?:NCCL ?)?work: ?-?\d|"
    r"running ?collective:.{1,2000}running ?collective: ?CollectiveFingerPrint\([^)]{0,300}"
    r"(?:\)|TensorDtypes)|"
    r"keys: ?/\S{1,200}$|waiting for key: ?\S{1,200} after|Socket Timeout"
)
_WHOLE_ONES = (
    _WHOLE,
    STUCK_WATCHDOG,
    GLOO,
    GLOO_CLOSED,
    BARRIER,
    CONNECTING,
    FAILED_LINE,
    DEEPSPEED,
    MPIRUN,
)


def _messages(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines, with those that a terminal has wrapped put together again."""
    begun, parts, begun_at, before = "", 0, 0, 0
    for number, line in lines:
        is_next = line and number <= before + 1 and not _NEW_MESSAGE.search(line)
        before = number
        if begun and parts < _MOST_JOINED and is_next:
            begun += line.lstrip() if begun.endswith(" ") else line
            parts += 1
        elif begun:
            yield begun_at, begun
            begun = ""
        if not begun:
            begun, begun_at, parts = line, number, 0
        is_frame = _CPP_FRAME.search(begun) is not None
        if is_frame or not _BEGINS.search(begun) or _is_whole(begun):
            yield begun_at, begun
            begun = ""
        elif begun.endswith(("[Rank", ":", ",", "by")):
            begun += " "
    if begun:
        yield begun_at, begun


def _is_whole(line: str) -> bool:
    return any(pattern.search(line) for pattern in _WHOLE_ONES)
