"""Stacks that somebody has made by hand.

py-spy dump (text, JSON, --native), pystack (and --native), gdb's py-bt, faulthandler in logs, the
files of torch.distributed.debug, and what a well-known loop over sys._current_frames() prints.

The rank comes from a launcher's prefix of the lines ([rank3]:, [default3]:, [1,3]<stderr>:, 3:), a
heading, the file's name (rank3.txt, r3.log, torchrun's 3/stderr.log), --local_rank in the command,
or else the order of the files. Several processes in a file are several ranks, and a bare number in
its name is none of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from nemo_patches.text import safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.collect.samples import Frame, counter
from nemo_patches.tools.diagnose.facts import Evidence, Fact, Fate, Member, Motion
from nemo_patches.tools.diagnose.places import (
    is_users,
    of_autograd,
    place,
    waits_for_work,
    went_on,
)
from nemo_patches.tools.diagnose.verdicts import LOADER

_LONGEST_LINE = 2000  # characters
_MOST_FRAMES, _MOST_THREADS = 300, 200
_MOST_RANK = 1 << 20
MOST_DETAILS = 4
_RANK_IN_NAME = re.compile(
    r"(?:rank|worker|proc|task|\br)[-_. ]?(\d{1,7})(?!\d)|"
    r"(?:^|[-_.])(\d{1,7})(?=\.(?:txt|log|json|err|out|stack|dump)$)",
    re.IGNORECASE,
)
_NO_RANK = re.compile(
    r"slurm|job|node|host|gpu|run", re.IGNORECASE
)  # a number of something else: slurm-4711.out
_PREFIX = re.compile(
    r"\s*(?:\[(?:rank|default)?(\d{1,7})\]:?|\[\d+,(\d{1,7})\]<std\w+>:?|(\d{1,7}):) ?"
)
# "=== Rank 3: host:port ===" of torch.distributed.debug, and what people write between stacks.
_HEADING = re.compile(
    r"(?:[=#*-]{2,} ?(?:global[ _])?rank[ =:_#]{0,2}(\d{1,7})\b|rank["
    r" _]?(\d{1,7}):?\s*$)",
    re.IGNORECASE,
)
_NEW_PROCESS = re.compile(r"Process (\d+): (.*)")
_LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,5})\b")
_IS_RANK = re.compile(
    r"(?:rank|\br)[-_. ]?\d{1,7}(?!\d)", re.IGNORECASE
)  # in a name; other numbers may be anything
_GDB_THREAD = re.compile(r"Thread (\d+) \(Thread 0x[0-9a-f]+ \(LWP (\d+)\)")
_HEADS = ("Process", "hread", "Traceback")
_MARK = re.compile(
    rb"Process \d{1,10}: |Thread (?:0x)?[0-9a-fA-F]{1,16} \((?:active|idle)|most recent"
    rb" call first\)|"
    rb"Traceback for thread \d|=== Rank \d|^[ \t]{0,8}File: \"[^\"\n]{1,500}\","
    rb" line \d",
    re.MULTILINE,
)
# Processes that are no ranks, by the files of their frames: launchers, and multiprocessing's own.
_NO_RANKS = re.compile(
    r"torch/distributed/elastic/agent/|deepspeed/launcher/|accelerate/commands/launch|"
    r"multiprocessing/(?:resource_tracker|forkserver)\.py"
)
# A collective in the text of the innermost line, for what prints no frames of it.
_CALLS_COLLECTIVE = re.compile(r"\b(?:dist|distributed|c10d)\.(\w{2,40})\(")


@dataclass(frozen=True)
class _Form:
    """How a tool prints stacks: the line that begins a thread, and the line of a frame, each with
    named groups.

    has_gil: words in a thread's state. innermost_last: the order of frames. main_last: the order of
    threads.
    """

    thread: re.Pattern[str]
    frame: re.Pattern[str]
    has_gil: str = ""
    innermost_last: bool = False
    main_last: bool = False

    def frame_in(self, line: str) -> Frame | None:
        if (found := self.frame.match(line)) is None:
            return None
        told = found.groupdict()
        file = (
            f"{told['library'] or ''}.so"
            if told.get("language") == "C"
            else told["file"]
        )
        number = told["line"] or ""
        return Frame(told["name"], file, int(number) if number.isdecimal() else 0)


_PY_SPY = _Form(
    re.compile(
        r"Thread (?:0x)?(?P<tid>[0-9a-fA-F]+) \((?P<state>[^)]*)\)(?::"
        r' "(?P<name>[^"]*)")?\s*$'
    ),
    re.compile(r"    (?P<name>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)\s*$"),
    has_gil="gil",
)
_FAULTHANDLER = _Form(
    re.compile(
        r"(?:Current thread|Thread) (?P<tid>0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?"
        r" \(most recent call first\):"
    ),
    re.compile(
        r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+?)\s*$'
    ),
    main_last=True,
)
_PYSTACK = _Form(
    re.compile(
        r"Traceback for thread (?P<tid>\d+)(?: \((?P<name>[^)]*)\))?(?P<state>.*)\(most"
        r" recent call last\):"
    ),
    re.compile(
        r'\s+\((?P<language>Python|C)\) File "(?P<file>[^"]*)", line (?P<line>\d+), in'
        r" (?P<name>.+?)"
        r"(?: \((?P<library>[^)]*)\))?\s*$"
    ),
    has_gil="Has the GIL",
    innermost_last=True,
)
_GDB = _Form(
    re.compile(r"Traceback \(most recent call first\):"),
    re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)'),
)
# What a loop over sys._current_frames() prints, with traceback.extract_stack().
_LOOP = _Form(
    re.compile(
        r"#+ ?(?:ProcessID=(?P<pid>\d+), ?)?Thread(?:ID)?[=:]"
        r" ?(?P<name>[^()#\d]{0,100}?) ?\(?(?P<tid>\d+)\)?[ #]*$"
    ),
    re.compile(
        r'\s{0,8}File: "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)\s*$'
    ),
    innermost_last=True,
)
_FORMS = (_FAULTHANDLER, _PY_SPY, _PYSTACK, _GDB, _LOOP)


@dataclass
class _Stack:
    """One thread of a dump."""

    form: _Form
    tid: str
    name: str = ""
    has_gil: bool = False
    frames: list[Frame] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    line: str = ""  # the text of its innermost line, where it is printed


@dataclass
class Dump:
    """One dump of one process. rank: None if not known. in_name: only its file's name tells it."""

    rank: int | None
    pid: int
    cite: str
    file: str
    in_name: bool = False
    local_rank: int | None = None
    stacks: list[_Stack] = field(default_factory=list)

    @property
    def is_worker(self) -> bool:
        return any(
            frame.name.rpartition(".")[2] == "_worker_loop"
            for stack in self.stacks
            for frame in stack.frames
        )

    @property
    def is_rank(self) -> bool:
        """False for a data loader's worker, a launcher, or multiprocessing's own process."""
        return not self.is_worker and not any(
            _NO_RANKS.search(frame.file) for frame in self.main.frames
        )

    @property
    def main(self) -> _Stack:
        whole = [stack for stack in self.stacks if stack.frames] or self.stacks
        named = (
            stack
            for stack in whole
            if "MainThread" in stack.name or stack.tid == str(self.pid)
        )
        return next(named, whole[-1] if whole[0].form.main_last else whole[0])


def _rank_in_name(name: str) -> int | None:
    folder, _, base = name.rpartition("/")
    found = _RANK_IN_NAME.search(base)
    if found and (found[1] or not _NO_RANK.search(base[: found.start()])):
        return int(found[1] or found[2])
    return int(folder) if folder.isdecimal() and int(folder) <= _MOST_RANK else None


def tells(head: bytes) -> bool:
    return _MARK.search(head) is not None


def dumps_in(content: bytes, name: str) -> list[Dump]:
    """Raises ValueError."""
    if content.lstrip().startswith(b"["):
        found = _of_json(content, name)
        if found is not None:
            return [found]
    if not _MARK.search(content):
        return []
    return list(_of_text(content.decode(errors="replace"), name))


class _SpyLocal(msgspec.Struct):
    name: str
    repr: str | None = None


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0
    locals: list[_SpyLocal] | None = None


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    owns_gil: bool
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None


def _of_json(content: bytes, name: str) -> Dump | None:
    """py-spy's JSON; None if it is another tool's."""
    try:
        threads = msgspec.json.decode(content, type=list[_SpyThread])
    except msgspec.DecodeError:
        if b'"owns_gil"' in content[: 1 << 16]:
            raise
        return None
    dump = Dump(
        _rank_in_name(name),
        threads[0].pid if threads else 0,
        safe(name, 200),
        name,
        in_name=True,
    )
    for thread in threads[:_MOST_THREADS]:
        frames = [
            Frame(frame.name, frame.filename, frame.line)
            for frame in thread.frames[:_MOST_FRAMES]
        ]
        stack = _Stack(
            _PY_SPY,
            str(thread.os_thread_id),
            thread.thread_name or "",
            thread.owns_gil,
            frames,
        )
        for frame in reversed(thread.frames[:_MOST_FRAMES]):
            for variable in frame.locals or ():
                stack.counters |= counter(
                    frame.name, frame.filename, variable.name, variable.repr or ""
                )
        dump.stacks.append(stack)
    return dump if dump.stacks else None


def _of_text(text: str, name: str) -> Iterator[Dump]:
    """All dumps of a file, in its order; lines of several ranks may be mixed, each with its
    prefix.
    """
    named, heading = _rank_in_name(name), None
    writers: dict[int | None, _Writer] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            continue
        if found := _HEADING.match(line):
            heading = int(found[1] or found[2])
            writers.pop(heading, None)
            continue
        prefix = _PREFIX.match(line)
        rank = (
            int(prefix[1] or prefix[2] or prefix[3])
            if prefix
            else heading
            if heading is not None
            else named
        )
        writer = writers.setdefault(
            rank, _Writer(rank, name, prefix is None and heading is None)
        )
        if (dump := writer.take(line[prefix.end() :] if prefix else line)) is not None:
            dump.cite = f"{safe(name, 200)}:{number}"
            yield dump


class _Writer:
    """What one process has written, line by line."""

    def __init__(self, rank: int | None, file: str, in_name: bool) -> None:
        self.rank = rank
        self.file = file
        self.in_name = in_name
        self.pid = 0
        self.local_rank: int | None = None
        self.dump: Dump | None = None
        self.stack: _Stack | None = None
        self.tid = ""  # from gdb's heading, for the stack that comes next

    def take(self, line: str) -> Dump | None:
        """The dump that begins with this line, if one does."""
        if not line or line[0].isspace() or line.startswith("File: "):
            if self.stack is not None:
                _take_frame(self.stack, line)
            return None
        if not any(word in line for word in _HEADS):
            self.stack = None  # after a dump, a traceback has lines as faulthandler's
            return None
        if found := _NEW_PROCESS.match(line):
            self.pid = int(found[1])
            self.dump = None
            self.stack = None
            local_rank = _LOCAL_RANK.search(found[2])
            self.local_rank = int(local_rank[1]) if local_rank else None
            return None
        if found := _GDB_THREAD.match(line):
            self.tid, self.stack = found[2], None
            return None
        self.stack = stack = self._begins(line)
        if stack is None:
            return None
        if (
            stack.form == _LOOP
            and (process := _LOOP.thread.match(line))
            and process["pid"]
        ):
            self.pid = int(process["pid"])
        is_new = self.dump is None or self.dump.stacks[-1].form != stack.form
        if (
            is_new
            or self.dump is None
            or any(other.tid == stack.tid for other in self.dump.stacks)
        ):
            self.dump = Dump(
                self.rank,
                self.pid,
                "",
                self.file,
                self.in_name,
                self.local_rank,
                [stack],
            )
            return self.dump
        if len(self.dump.stacks) < _MOST_THREADS:
            self.dump.stacks.append(stack)
        return None

    def _begins(self, line: str) -> _Stack | None:
        for form in _FORMS:
            if found := form.thread.match(line):
                told = found.groupdict("")
                if "tid" not in told:  # gdb's is in a line before
                    told["tid"], self.tid = self.tid, ""
                has_gil = bool(form.has_gil) and form.has_gil in told["state"]
                return _Stack(form, told["tid"], told.get("name", ""), has_gil)
        return None


def _take_frame(stack: _Stack, line: str) -> None:
    """A frame, or the text of the frame's line before it."""
    frame = stack.form.frame_in(line)
    if frame is None:
        is_innermost = len(stack.frames) == 1 or stack.form.innermost_last
        if line.strip() and stack.frames and is_innermost:
            stack.line = line.strip()
    elif len(stack.frames) < _MOST_FRAMES:
        stack.frames.insert(
            0 if stack.form.innermost_last else len(stack.frames), frame
        )
        stack.line = "" if stack.form.innermost_last else stack.line


def facts_of(dumps: Iterable[Dump], evidence: Evidence) -> list[Fact]:
    """The facts of each rank's last dump, and whether it moved since the first one of the same
    process.
    """
    dumps = list(dumps)
    workers = [dump for dump in dumps if dump.is_worker]
    ranks = [dump for dump in dumps if dump.is_rank] or dumps
    _take_back_names(ranks)
    by_rank: dict[int, list[Dump]] = {}
    unnamed = list[Dump]()
    for dump in ranks:
        if dump.rank is None:
            unnamed.append(dump)
        elif dump.rank <= _MOST_RANK:
            by_rank.setdefault(dump.rank, []).append(dump)
    if unnamed and by_rank:
        evidence.problems.append(
            f"{unnamed[0].cite}: no rank is told for the stack there; others are, so it"
            " is left out"
        )
    elif unnamed:
        by_rank = _numbered(unnamed, evidence)
    return [
        fact
        for rank, of_rank in sorted(by_rank.items())
        for fact in _of_dumped(rank, of_rank, workers)
    ]


def _take_back_names(dumps: Sequence[Dump]) -> None:
    """Of a number in a file's name that is no rank: of a date, a look, a process, or of a file with
    several processes.

    A bare number counts only where every file has one; numbers from 1 on count files.
    """
    by_file: dict[str, list[Dump]] = {}
    for dump in dumps:
        if dump.rank is None or dump.in_name:
            by_file.setdefault(dump.file, []).append(dump)
    bare = [
        of_file
        for file, of_file in by_file.items()
        if not _IS_RANK.search(file.rpartition("/")[2])
    ]
    numbers = [
        of_file[0].rank
        for of_file in bare
        if not of_file[0].file.rpartition("/")[0].isdecimal()
    ]
    known = sorted(number for number in numbers if number is not None)
    is_count = len(known) > 1 and known == list(range(1, len(known) + 1))
    is_padded = (
        len(bare) == 1 and re.search(r"(?:^|[-_.])0\d", bare[0][0].file) is not None
    )
    are_no_ranks = (
        is_count
        or is_padded
        or len(known) < len(numbers)
        or len(set(known)) < len(known)
    )
    for of_file in by_file.values():
        pids = {dump.pid for dump in of_file if dump.pid}
        is_bare = of_file in bare and not of_file[0].file.rpartition("/")[0].isdecimal()
        if len(pids) > 1 or (is_bare and (are_no_ranks or of_file[0].rank in pids)):
            for dump in of_file:
                dump.rank = None


def _numbered(dumps: Sequence[Dump], evidence: Evidence) -> dict[int, list[Dump]]:
    """By --local_rank of their commands, if all have one, else in the order of the files."""
    files: dict[str, set[int]] = {}
    for dump in dumps:
        files.setdefault(dump.file, set()).add(dump.pid)
    several = [pids for pids in files.values() if len(pids) > 1]
    are_looks = len(several) == len(files) and all(
        pids == several[0] for pids in several
    )  # at the same processes
    by_process: dict[tuple[str, int], list[Dump]] = {}
    for dump in dumps:
        by_process.setdefault(("" if are_looks else dump.file, dump.pid), []).append(
            dump
        )
    local_ranks = {of_process[0].local_rank for of_process in by_process.values()}
    if None not in local_ranks and len(local_ranks) == len(by_process):
        return {
            of_process[0].local_rank or 0: of_process
            for of_process in by_process.values()
        }
    evidence.problems.append(
        "no file name or line tells a rank: they are numbered in the order of the files"
    )
    return dict(enumerate(by_process.values()))


def _training(dump: Dump) -> _Stack:
    """Its main thread; in backward, with the frames that autograd's own thread runs for it."""
    main = dump.main
    theirs = of_autograd(main, [stack for stack in dump.stacks if stack is not main])
    if theirs is None:
        return main
    counters = {**theirs.counters, **main.counters}
    return replace(
        main, frames=[*theirs.frames, *main.frames], counters=counters, line=theirs.line
    )


def _worker_of(dump: Dump, workers: Sequence[Dump]) -> str:
    """Where the data loader's workers are that were dumped into the same file."""
    for worker in workers:
        frames = worker.main.frames
        inside = next(
            (
                n
                for n, one in enumerate(frames)
                if one.name.rpartition(".")[2] == "_worker_loop"
            ),
            None,
        )
        if (
            worker.file == dump.file
            and inside is not None
            and not waits_for_work(frames[: inside + 1])
        ):
            return (
                f"a worker (pid {worker.pid}) is in {place(frames[: inside + 1]).where}"
            )
    return ""


def _of_dumped(
    rank: int, dumps: Sequence[Dump], workers: Sequence[Dump]
) -> Iterator[Fact]:
    last = dumps[-1]
    main = _training(last)
    if not any(stack.frames for stack in last.stacks):
        return
    found = place(main.frames)
    if not found.collective and (called := _CALLS_COLLECTIVE.search(main.line)):
        found = replace(
            found, collective=called[1], caller=found.where.partition(" < ")[0]
        )
    details = list[str]()
    if main.has_gil and not found.collective:
        details.append("it holds Python's lock (GIL)")
    if not found.collective:
        details += [
            f"its thread {safe(stack.name or stack.tid, 60)!r} is in"
            f" {place(stack.frames).where}"
            for stack in last.stacks
            if stack.tid != main.tid
            and stack.frames[:1] != main.frames[:1]
            and is_users(stack.name, stack.frames)
        ]
    worker = _worker_of(last, workers) if found.activity == LOADER else ""
    if last.pid:
        yield Fact(rank, Member(pid=last.pid), last.cite)
    if main.form != _FAULTHANDLER:  # faulthandler writes when a process ends, too
        yield Fact(rank, Fate(fates.RUNS), last.cite)
    yield Fact(
        rank,
        replace(found, worker=worker, details=tuple(details[:MOST_DETAILS])),
        last.cite,
    )
    before = next(
        (
            dump
            for dump in dumps[:-1]
            if dump.pid == last.pid and dump.main.form == main.form
        ),
        None,
    )
    if before is not None:
        by = went_on(_training(before), main)
        yield Fact(rank, Motion(bool(by), by), last.cite)
