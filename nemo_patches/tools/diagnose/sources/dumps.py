"""Stacks that somebody has made by hand.

py-spy dump (text, JSON, --native), pystack, gdb's py-bt and bt, faulthandler in logs, the files of
torch.distributed.debug, and what a well-known loop over sys._current_frames() prints.

The rank comes from what stands beside the process or in its command (# rank 3, RANK=3), a
launcher's prefix of the lines ([rank3]:, [default3]:, [1,3]<stderr>:, 3:), a heading, the file's
name (rank3.txt, r3.log, torchrun's 3/stderr.log), the log's line of that process id, --local_rank
in the command, or else the order of the files. Several processes in a file, or behind one prefix,
are several ranks: neither its name nor the prefix is theirs.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from nemo_patches.judging.kinds import is_guess
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.collect.samples import Frame, Thread, thread_of
from nemo_patches.tools.diagnose.rank_facts import (
    MAIN_THREAD,
    NOT_TOLD,
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps
from nemo_patches.tools.diagnose.sources.lines import (
    LOCAL_RANK_OF_COMMAND,
    RANK_OF_COMMAND,
    said,
)
from nemo_patches.tools.diagnose.thread_places import (
    is_native,
    is_users,
    of_autograd,
    place,
    waits_for_work,
    went_on,
)
from nemo_patches.tools.diagnose.verdicts import ENDING, LOADER

_LONGEST_LINE = 2000  # characters
_MOST_FRAMES, _MOST_THREADS = 300, 200
_MOST_RANK = 1 << 20
MOST_DETAILS = 4
_MOST_NATIVE = 3  # innermost frames of C that are shown
RUNS = "it runs"
# With the word it is a rank; a bare number, without a zero before it, may be one.
_RANK_IN_NAME = re.compile(
    r"(?:rank|worker|proc|task|\br)[-_. ]?(\d{1,7})(?!\d)", re.IGNORECASE
)
_BARE_NUMBER = re.compile(
    r"(?:^|[-_.])(0|[1-9]\d{0,6})\.(?:txt|log|json|err|out|stack|dump)$"
)
_NO_RANK = re.compile(r"slurm|job|node|host|gpu|run", re.IGNORECASE)  # slurm-4711.out
# Containers have the same process ids on every host; lines have its label.
_OF_HOST = re.compile(r"(?:node|host|gpu|pod|worker)[-_.]?\d|[:|\]] ?$", re.IGNORECASE)
# What pdsh, clush and kubectl write before each line: "node1: ", "[pod/worker-0] ".
_LABEL = re.compile(
    r"((?:\[[^\]\s]{1,200}\]|[\w.\-/]{1,200}(?::| {0,80}\|)) ?)Process \d{1,10}: "
)
_MOST_LABELS = 256
_PREFIX = re.compile(
    r"\s*(?:\[(?:rank|default)?(\d{1,7})\]:?|\[\d+,(\d{1,7})\]<std\w+>:?|(\d{1,7}):) ?"
)
# "=== Rank 3: host:port ===" of torch.distributed.debug, "==> rank3.txt <==" of tail, and what
# people write between stacks.
_HEADING = re.compile(
    r"(?:[=#*-]{2,}>? ?(?:[\w./ -]{0,80}(?<!node)(?<!local)[/_. -])?"
    r"(?:rank|process_index|task(?=[ =:_#]{0,2}\d{1,7}\b(?!\s?[:.,-]\s?\w)))"
    r"[ =:_#]{0,2}(\d{1,7})\b|"
    r"#? ?rank[ _]?(\d{1,7}):?\s*$)",
    re.IGNORECASE,
)
# Likewise "=== worker-3 ===": containers have the same process ids.
_HOST_HEADING = re.compile(
    r"[=#*-]{2,} ?(.{0,80}(?:node|host|gpu|pod|worker)[-_. ]?\d.{0,80}?) ?[=#*-]{2,}\s*$",
    re.IGNORECASE,
)
_NEW_PROCESS = re.compile(
    r"(?:Process |.{0,200}\b(?:gdb\b.{0,80}? (?:-p|--pid)[ =]|[pg]stack )|Attaching to process )"
    r"(?P<pid>\d{1,10})\b:?(?P<command>.*)"
)
# "Process 4414: python train.py (rank 3)", "$ py-spy dump --pid 4414  # local rank 3"
_SAID = re.compile(
    r"(?:Process \d{1,10}: |.{0,200}\b(?:py-spy|pystack|gdb)\b).{0,1000}[(#\[][^()#\[\]]{0,20}?"
    r"(?P<local>local[_ -]?)?rank[ =:_#-]{0,2}(?P<rank>\d{1,6})\b",
    re.IGNORECASE,
)
# In what people write above a stack, with its process's id: "host=n2 rank=3 pid=4414"
_RANK_ABOVE = re.compile(
    r"(?<![a-z_])(?<!local[ _-])rank[ =:_#-]{0,2}(\d{1,6})\b", re.IGNORECASE
)
# A title that a server gives its processes: "sglang::scheduler_TP2", "VLLM::Worker_TP3". Where
# there is data or pipeline parallelism as well, the numbers are no ranks.
_TITLE = re.compile(
    r"\s(?P<of_group>\S*(?:DP|PP)_?[1-9])?[\w:.-]{0,80}(?:TP|[Rr]ank|[Ww]orker)[_-]?(?P<number>\d{1,6})"
    r"(?P<of_more>_(?:DP|PP)_?[1-9]\d*)?(?:_[A-Z]{2}\d+)*$"
)
# An environment, as /proc has it, and whose
_ENVIRONMENT = re.compile(r"(?:LOCAL_)?RANK=\d{1,6}\s*$")
_OF_PROCESS = re.compile(r".{0,200}/proc/(\d{1,10})/environ\b")
_NEAR = 16  # lines between it and its process
_GDB_THREAD = re.compile(r"Thread \d+ \(Thread 0x[0-9a-f]+ \(LWP (\d{1,10})\)")
_HEADS = ("Process", "hread", "Traceback", "gdb", "stack ", "Attaching")
_MARK = re.compile(
    rb"Process \d{1,10}: |Thread (?:0x)?[0-9a-fA-F]{1,16} \((?:active|idle)|=== Rank \d|"
    rb"Traceback for thread \d|most recent call first\)|"
    rb"[Tt]hread [^\n]{1,120}(?:stack(?: ?trace)?|traceback):[ \t\r]*$|"
    rb"(?:[Ss]tack(?: ?trace)?|[Tt]raceback) (?:of|for) (?:the )?[Tt]hread [^\n]{1,120}:[ \t\r]*$|"
    rb"^[ \t]{0,8}File: \"[^\"\n]{1,500}\", line \d|"
    rb"^#0 +(?:0x[0-9a-f]{4,16} in )?[\w:~<>@?]{1,200} ?\(",
    re.MULTILINE,
)
# Processes that are no ranks, by the files of their frames: launchers, and multiprocessing's own.
_NO_RANKS = re.compile(
    r"torch/distributed/elastic/agent/|deepspeed/launcher/|accelerate/commands/launch|"
    r"multiprocessing/(?:resource_tracker|forkserver)\.py"
)
# A collective in the text of the innermost line, for what prints no frames of it: torch's, and
# mpi4py's.
_CALLS_COLLECTIVE = re.compile(
    r"\b(?:(?:dist|distributed|c10d)\.(?P<torchs>\w{2,40})|(?:comm|COMM_WORLD)\.(?P<mpis>"
    r"(?i:bcast|barrier|(?:all)?reduce|(?:all)?gather|scatter|alltoall)v?))\("
)
_FILE_FRAME = re.compile(
    r'\s{0,8}(?:\(Python\) )?File:? "(?P<file>[^"]+)", line (?P<line>\d{1,9}|\?+),?'
    r" in (?P<name>.+?)\s*$"
)


@dataclass(frozen=True)
class _Form:
    """How a tool prints stacks: the line that begins a thread, and the line of a frame, each with
    named groups. innermost_last: the order of frames. main_last: the order of threads.
    """

    thread: re.Pattern[str]
    frame: re.Pattern[str] = _FILE_FRAME
    innermost_last: bool = False
    main_last: bool = False


_PY_SPY = _Form(
    re.compile(
        r"Thread (?P<tid>(?:0x)?[0-9a-fA-F]{1,16}) \((?P<state>[^)]*)\)(?:: \"(?P<name>[^\"]*)\")?"
        r"\s*$"
    ),
    re.compile(
        r" {3,4}(?P<name>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d{1,9}))?\)\s*$"
    ),
)
_FAULTHANDLER = _Form(
    re.compile(
        r"(?:Current thread|Thread) (?P<tid>0x[0-9a-f]{1,16})(?: \[(?P<name>[^\]]*)\])?"
        r" \(most recent call first\):"
    ),
    main_last=True,
)
_GDB = _Form(re.compile(r"Traceback \(most recent call first\):"))
_LOOP = _Form(
    re.compile(
        r"#+ ?(?:ProcessID=(?P<pid>\d{1,10}), ?)?Thread(?:ID)?[=:]"
        r" ?(?P<name>[^()#\d]{0,100}?) ?\(?(?P<tid>\d{1,20})\)?[ #]*$"
    ),
    innermost_last=True,
)
_PYSTACK = _Form(
    re.compile(
        r"Traceback for thread (?P<tid>\d{1,10}) \([^)]*\) .{0,80}\(most recent call last\):"
    ),
    innermost_last=True,
    main_last=True,
)
# gdb's bt: frames of C, in some of which gdb sees Python's
_GDB_NATIVE = _Form(re.compile("(?!)"), main_last=True)
_GDB_FRAME = re.compile(
    r"#(?P<number>\d{1,3})\s+(?:0x[0-9a-f]+ in )?(?P<name>\S{1,200}?) ?\(.*\)"
    r"(?: at (?P<at>\S{1,500})| from (?P<library>\S{1,500}))?\s*$"
)
_GDB_PYTHON = re.compile(
    r"\bFrame 0x[0-9a-f]+, for file (?P<file>[^,]{1,500}), line (?P<line>\d{1,9}),"
    r" in (?P<name>\S{1,200}) \("
)
_OF_PYTHON = re.compile(
    r"_?Py[A-Z_]\w*$|.*[ /](?:Python|Objects|Modules|Programs)/\w+\.c:\d"
)
_OF_A_CRASH = re.compile(r"(?:__GI_)?(?:raise|abort)$|<signal$|__pthread_kill")
# What a job's own watch over hangs writes of each thread, as a logger's lines have its rank
_WATCHS = _Form(
    re.compile(
        r"(?:.{0,200}?(?<![A-Za-z_])(?i:rank)[ =:_#-]{0,2}(?P<rank>\d{1,6})\b)?.{0,200}?"
        r"(?:\b[Tt]hread (?P<one>['\"]?[\w.<> -]{1,80}?['\"]?)(?: \(\w{1,40}\))?:? "
        r"(?:(?:call )?stack(?: ?trace)?|traceback)|"
        r"\b(?i:(?:call )?stack(?: ?trace)?|traceback) (?:of|for) (?:the )?[Tt]hread "
        r"(?P<other>['\"]?[\w.<> -]{1,80}?['\"]?)(?: \(\w{1,40}\))?):\s*$"
    ),
    innermost_last=True,
)
_FORMS = (_FAULTHANDLER, _PY_SPY, _GDB, _LOOP, _PYSTACK, _WATCHS)
_OF_LOGS = (_FAULTHANDLER, _LOOP, _WATCHS)  # that a process writes itself


@dataclass
class Dump:
    """One dump of one process. rank: None if not known. in_name: only its file's name tells it.
    label: which prefix or heading does, as one of several. command: without numbers. title: the
    number in its process's title, or NOT_TOLD. active: ids of threads that run, as py-spy says.
    lines: by thread, the text of its innermost line, where it is printed.
    """

    rank: int | None
    pid: int
    cite: str
    file: str
    form: _Form
    in_name: bool = False
    label: str = ""
    local_rank: int | None = None
    command: str = ""
    title: int | None = None
    threads: list[Thread] = field(default_factory=list)
    active: set[int] = field(default_factory=set)
    lines: dict[tuple[int, str], str] = field(default_factory=dict)

    @property
    def is_worker(self) -> bool:
        return is_loaders(self.main.frames)

    @property
    def is_rank(self) -> bool:
        """False for a data loader's worker, a launcher, or multiprocessing's own process. A rank
        that one of them has forked has its frames, too, below those of its own.
        """
        own = takewhile(lambda frame: frame.name != "_bootstrap", self.main.frames)
        return not self.is_worker and not any(
            _NO_RANKS.search(frame.file) for frame in own
        )

    @property
    def is_of_a_crash(self) -> bool:
        """A backtrace that gdb made of a process that was at its end."""
        of_all = (frame for one in self.threads for frame in one.frames)
        return self.form == _GDB_NATIVE and (
            not (self.pid or self.main.tid)
            or any(_OF_A_CRASH.match(frame.name) for frame in of_all)
        )

    @property
    def main(self) -> Thread:
        whole = [one for one in self.threads if one.frames] or self.threads
        named = (
            one for one in whole if "MainThread" in one.name or one.tid == self.pid
        )
        return next(named, whole[-1] if self.form.main_last else whole[0])

    @property
    def training(self) -> Thread:
        main = self.main
        return training(main, [one for one in self.threads if one is not main])


def training(main: Thread, others: Sequence[Thread]) -> Thread:
    """The main thread; in backward, with the frames that autograd's own thread runs for it."""
    theirs = of_autograd(main, others)
    if theirs is None:
        return main
    return replace(
        main,
        frames=(*theirs.frames, *main.frames),
        calls=theirs.calls,
        counters={**theirs.counters, **main.counters},
        loops={**theirs.loops, **main.loops},
    )


def own_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """A child's up to the function that it began with: a forked process has its parent's frames,
    too.
    """
    for number, frame in enumerate(frames):
        name = frame.name.rpartition(".")[2]
        is_start = frame.file.endswith("multiprocessing/process.py")
        if name == "_worker_loop" or (name == "_bootstrap" and is_start):
            return frames[: number + 1]
    return frames


def is_loaders(frames: Sequence[Frame]) -> bool:
    """Whether they are of a data loader's worker."""
    return any(frame.name.rpartition(".")[2] == "_worker_loop" for frame in frames)


def thread_title(thread: Thread) -> str:
    return f"its thread {safe(thread.name or str(thread.tid), 60)!r}"


def other_threads(main: Thread, threads: Sequence[Thread]) -> list[str]:
    """Where the threads are that stand in the user's code."""
    return [
        f"{thread_title(one)} is in {place(one.frames).where}"
        for one in threads
        if one.tid != main.tid
        and one.name != MAIN_THREAD
        and one.frames[:1] != main.frames[:1]  # autograd's are main's, too
        and is_users(one.name, one.frames)
    ]


def tells(head: bytes) -> bool:
    return _MARK.search(head) is not None


def dumps_in(content: bytes, name: str) -> list[Dump]:
    """Raises ValueError."""
    if content.lstrip().startswith(b"[") and b'"owns_gil"' in content[: 1 << 16]:
        return list(_of_json(content, name))
    if not _MARK.search(content):
        return []
    return _of_text(content.decode(errors="replace"), name)


def _of_json(content: bytes, name: str) -> Iterator[Dump]:
    """py-spy's, of several processes one after the other."""
    rank, cite = _rank_in_name(name), safe(name, 200)
    rest = content.decode().strip()
    while rest:
        told, end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].lstrip()
        try:
            threads = [thread_of(0, thread) for thread in told[:_MOST_THREADS]]
            pid = int(told[0].get("pid", 0))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no dump of py-spy's: {error}") from error
        yield Dump(rank, pid, cite, name, _PY_SPY, in_name=True, threads=threads)


def _rank_in_name(name: str) -> int | None:
    folder, _, base = name.rpartition("/")
    if found := _RANK_IN_NAME.search(base):
        return int(found[1])
    if folder.isdecimal() and int(folder) <= _MOST_RANK:
        return int(folder)
    bare = _BARE_NUMBER.search(base)
    return int(bare[1]) if bare and not _NO_RANK.search(base) else None


def _of_text(text: str, name: str) -> list[Dump]:
    """All dumps of a file, in its order; lines of several ranks may be mixed, each with its
    prefix. None of those after which the job has gone on.
    """
    dumps: list[Dump] = []
    steps = Steps()  # since the last of them
    named, heading = _rank_in_name(name), None
    watched: int | None = None  # whose stack of a thread its own watch writes
    writers: dict[tuple[int | None, str], _Writer] = {}
    labels: dict[str, None] = {}
    lines = (
        (number, line)
        for number, whole in enumerate(text.split("\n"), 1)
        for line in said(whole).split("\n")
    )
    host = ""  # by a heading, where that has no rank
    said_of = _Said()  # of the process that comes next, or the present one
    environments: dict[int, _Said] = {}  # by process, 0: the next one
    whose = 0  # the one that is being told
    is_of_next = awaits_thread = False
    before_it = ""  # the last line that names a rank
    headings = 0
    for number, line in lines:
        if len(line) > _LONGEST_LINE:
            continue
        if found := _HEADING.match(line):
            heading = int(found[1] or found[2])
            headings += 1
            writers.pop((heading, ""), None)
            continue
        if line[:1].strip():  # no frame
            may_be = "hread" in line and line.rstrip().endswith(":")
            found = _WATCHS.thread.match(line) if may_be else None
            watched = int(found["rank"]) if found and found["rank"] else None
        if found := _HOST_HEADING.match(line):
            host = found[1]
            continue
        rank = named if heading is None else heading
        rank = rank if watched is None else watched
        if prefix := _PREFIX.match(line):
            rank = int(prefix[1] or prefix[2] or prefix[3])
            line = line[prefix.end() :]
        if (found := _LABEL.match(line)) and len(labels) < _MOST_LABELS:
            labels[found[1]] = None
        label = next(filter(line.startswith, labels), "")
        line, label = line[len(label) :], label or host
        new = _NEW_PROCESS.match(line)
        is_new = new is not None
        if "/proc/" in line and (of_process := _OF_PROCESS.match(line)):
            whose = int(of_process[1])
        elif _ENVIRONMENT.match(line) and not awaits_thread:
            before = environments.get(whose, _Said())
            environments[whose] = before.with_more(_said(line, True), number)
        if new:
            near = environments.pop(0, None)
            own = environments.get(int(new["pid"]))
            if own is None and near and number - near.at <= _NEAR:
                own = near
            whose = 0
            above = _said_above(before_it, new["pid"])
            said_of = own or (said_of if is_of_next else above)
            is_of_next, awaits_thread = False, True
        if "rank" in line.lower():
            before_it = line
            if told := _said(line, is_new or awaits_thread):
                said_of, is_of_next = told, not awaits_thread
        if dump := writers.setdefault((rank, label), _Writer()).take(line):
            awaits_thread = False
            dump.rank, dump.file = rank, name + label
            dump.in_name = prefix is None and heading is None and watched is None
            dump.local_rank = said_of.local_rank
            if said_of.rank is not None:
                dump.rank, dump.in_name = said_of.rank, False
            elif not dump.in_name:
                dump.label = f"{dump.file} {rank} {headings}"
            dump.cite = f"{safe(name, 200)}:{number}"
            dumps.append(dump)
            steps.begin()
        elif (
            dumps
            and dumps[-1].form in _OF_LOGS
            and line[:1].strip()
            and steps.go_on(line)
        ):
            dumps.clear()
            writers.clear()
    return dumps


class _Said(NamedTuple):
    """What words beside a process tell of its rank."""

    rank: int | None = None
    local_rank: int | None = None
    at: int = 0  # number of the line

    def with_more(self, told: _Said | None, at: int) -> _Said:
        told = told or _Said()
        rank = self.rank if told.rank is None else told.rank
        local = self.local_rank if told.local_rank is None else told.local_rank
        return _Said(rank, local, at)


def _said(line: str, is_of_process: bool) -> _Said | None:
    """is_of_process: the line has its command, or its environment."""
    if is_of_process:
        told = RANK_OF_COMMAND.search(line)
        local = LOCAL_RANK_OF_COMMAND.search(line)
        if told or local:
            return _Said(
                int(told[1]) if told else None, int(local[1]) if local else None
            )
    if (found := _SAID.match(line)) is None:
        return None
    rank = int(found["rank"])
    return _Said(local_rank=rank) if found["local"] else _Said(rank)


def _said_above(line: str, pid: str) -> _Said:
    ranks = set(_RANK_ABOVE.findall(line))
    is_of_it = len(ranks) == 1 and re.search(rf"\b{pid}\b", line)
    return _Said(int(ranks.pop())) if is_of_it else _Said()


class _Writer:
    """What one process has written, line by line."""

    def __init__(self) -> None:
        self.pid = 0
        self.command = ""
        self.title: int | None = None
        self.dump: Dump | None = None
        self.is_in_stack = False
        self.tid = ""  # from gdb's heading, for the stack that comes next

    def take(self, line: str) -> Dump | None:
        """The dump that begins with this line, if one does."""
        if not line or line[0].isspace() or line.startswith("File: "):
            if self.is_in_stack and self.dump is not None:
                _take_frame(self.dump, line)
            return None
        if line[0] == "#" and (found := _GDB_FRAME.match(line)):
            return self._take_of_gdb(found)
        self.is_in_stack = (
            False  # after a dump, a traceback has lines as faulthandler's
        )
        if not any(word in line for word in _HEADS):
            return None
        if found := _NEW_PROCESS.match(line):
            self.pid, self.dump = int(found["pid"]), None
            self.command = re.sub(r"\d", "", found["command"])
            title = _TITLE.match(found["command"])
            is_of_group = title and (title["of_group"] or title["of_more"])
            self.title = NOT_TOLD if is_of_group else title and int(title["number"])
        elif found := _GDB_THREAD.match(line):
            self.tid = found[1]
        else:
            for form in _FORMS:
                if found := form.thread.match(line):
                    return self._begin(form, found.groupdict(""))
        return None

    def _take_of_gdb(self, found: re.Match[str]) -> Dump | None:
        begun = None
        if found["number"] == "0":
            begun = self._begin(_GDB_NATIVE, {})
        if self.dump and self.is_in_stack and self.dump.form == _GDB_NATIVE:
            if python := _GDB_PYTHON.search(found[0]):
                frame = Frame(python["name"], python["file"], int(python["line"]))
            elif _OF_PYTHON.match(f"{found['name']} {found['at'] or ''}"):
                return begun
            else:
                frame = Frame(found["name"], found["library"] or "", 0)
            _add_frame(self.dump, frame)
        return begun

    def _begin(self, form: _Form, told: dict[str, str]) -> Dump | None:
        self.is_in_stack = True
        is_main = told.get("name") == MAIN_THREAD and told["tid"].isdecimal()
        # Of a text without its head: a main thread has its process's id.
        self.pid = int(told.get("pid") or self.pid or (told["tid"] if is_main else 0))
        tid, self.tid = told.get("tid") or self.tid, ""
        name = (told.get("one") or told.get("other", "")).strip("'\"")
        thread = Thread(
            name=name or told.get("name", ""),
            tid=int(tid or "0", 10 if tid.isdecimal() else 16),
            has_gil="gil" in told.get("state", ""),
        )
        dump = self.dump
        is_next = dump is not None and dump.form == form
        known = {*map(_key, dump.threads)} if dump else set()
        if dump is None or not is_next or _key(thread) in known:
            self.dump = Dump(None, self.pid, "", "", form, command=self.command)
            self.dump.title = self.title
        assert self.dump is not None
        if len(self.dump.threads) < _MOST_THREADS:
            self.dump.threads.append(thread)
            if told.get("state", "").startswith("active"):
                self.dump.active.add(thread.tid)
        return None if self.dump is dump else self.dump


def _key(thread: Thread) -> tuple[int, str]:
    return thread.tid, thread.name


def _take_frame(dump: Dump, line: str) -> None:
    """A frame, or the text of the frame's line before it."""
    thread, form = dump.threads[-1], dump.form
    if (found := form.frame.match(line)) is None:
        if line.strip() and (len(thread.frames) == 1 or form.innermost_last):
            dump.lines[_key(thread)] = line.strip()
        return
    number = found["line"] or ""
    _add_frame(
        dump,
        Frame(found["name"], found["file"], int(number) if number.isdecimal() else 0),
    )


def _add_frame(dump: Dump, frame: Frame) -> None:
    thread, form = dump.threads[-1], dump.form
    if len(thread.frames) < _MOST_FRAMES:
        frames = (
            (frame, *thread.frames) if form.innermost_last else (*thread.frames, frame)
        )
        dump.threads[-1] = replace(thread, frames=frames)
        if form.innermost_last:
            dump.lines.pop(_key(thread), None)


def facts_of(dumps: Iterable[Dump], evidence: Evidence) -> list[Fact]:
    """The facts of each rank's last dump, and whether it moved since the first one of the same
    process.
    """
    dumps = [
        dump
        for dump in dumps
        if any(one.frames for one in dump.threads) and not dump.is_of_a_crash
    ]
    workers = [dump for dump in dumps if dump.is_worker]
    ranks = [dump for dump in dumps if dump.is_rank] or dumps
    _take_back_names(ranks)
    _take_back_labels(ranks)
    for dump in ranks:
        if dump.form == _GDB_NATIVE:  # pstack's, which writes the main thread last
            dump.pid = dump.pid or dump.main.tid
        told = evidence.rank_of_pid.get(dump.pid, NOT_TOLD)
        if dump.rank is None and told != NOT_TOLD:
            dump.rank = told
    _name_by_titles(ranks)
    by_rank: dict[int, list[Dump]] = defaultdict(list)
    unnamed = [dump for dump in ranks if dump.rank is None]
    for dump in ranks:
        if dump.rank is not None and dump.rank <= _MOST_RANK:
            by_rank[dump.rank].append(dump)
    if unnamed and by_rank:
        text = "no rank is told for the stack there; others are, so it is left out"
        evidence.problems.append(f"{unnamed[0].cite}: {text}")
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
    by_file: dict[str, list[Dump]] = defaultdict(list)
    for dump in dumps:
        if dump.in_name:
            by_file[dump.file].append(dump)
    bare = {
        file: of_file[0].rank
        for file, of_file in by_file.items()
        if not _RANK_IN_NAME.search(file.rpartition("/")[2])
        and not file.rpartition("/")[0].isdecimal()
    }
    known = sorted(number for number in bare.values() if number is not None)
    is_count = len(known) > 1 and known == list(range(1, len(known) + 1))
    are_ranks = len(set(known)) == len(bare) and not is_count
    for file, of_file in by_file.items():
        pids = {dump.pid for dump in of_file if dump.pid}
        is_other = file in bare and (not are_ranks or bare[file] in pids)
        if len(pids) > 1 or is_other:
            for dump in of_file:
                dump.rank = None


def _take_back_labels(dumps: Sequence[Dump]) -> None:
    """Of a prefix or a heading behind which several processes have one command."""
    labelled: dict[tuple[str, str], list[Dump]] = defaultdict(list)
    for dump in dumps:
        if dump.label:
            labelled[dump.label, dump.command].append(dump)
    for some in labelled.values():
        if len({dump.pid for dump in some}) > 1:
            for dump in some:
                dump.rank = None


def _name_by_titles(dumps: Sequence[Dump]) -> None:
    """Where no rank is told and processes have titles, each with a number of its own."""
    titled = [dump for dump in dumps if dump.title is not None]
    by_title: dict[int | None, set[tuple[str, int]]] = defaultdict(set)
    for dump in titled:
        by_title[dump.title].add((dump.file, dump.pid))
    are_told = any(dump.rank is not None for dump in dumps) or NOT_TOLD in by_title
    if are_told or any(len(processes) > 1 for processes in by_title.values()):
        return
    for dump in titled:
        dump.rank = dump.title


def _numbered(dumps: Sequence[Dump], evidence: Evidence) -> dict[int, list[Dump]]:
    """By --local_rank of their commands, if all have one, else in the order of the files."""
    files: dict[str, set[int]] = defaultdict(set)
    for dump in dumps:
        files[dump.file].add(dump.pid)
    one = next(iter(files.values()))
    # Looks at the same processes
    are_looks = len(one) > 1 and all(pids == one for pids in files.values())
    are_looks = are_looks and not any(map(_OF_HOST.search, files))
    by_process: dict[tuple[str, int], list[Dump]] = defaultdict(list)
    for dump in dumps:
        by_process["" if are_looks else dump.file, dump.pid].append(dump)
    by_local_rank = {
        of_process[0].local_rank: of_process for of_process in by_process.values()
    }
    if None not in by_local_rank and len(by_local_rank) == len(by_process):
        return {rank or 0: of_process for rank, of_process in by_local_rank.items()}
    if len(by_process) == 1:
        evidence.problems.append(
            f"{dumps[0].cite}: nothing tells the rank of its stack"
        )
        return {NOT_TOLD: [*dumps]}
    evidence.problems.append(
        "no file name or line tells a rank: they are numbered in the order of the files"
    )
    evidence.is_numbered = True
    return dict(enumerate(by_process.values()))


def _worker_of(dump: Dump, workers: Sequence[Dump]) -> str:
    """Where the data loader's workers are that were dumped into the same file."""
    for worker in workers:
        frames = own_frames(worker.main.frames)
        if worker.file == dump.file and not waits_for_work(frames):
            native = [frame.name for frame in takewhile(is_native, frames)]
            inner = "".join(f"{name} < " for name in native[:_MOST_NATIVE])
            return f"a worker (pid {worker.pid}) is in {inner}{place(frames).where}"
    return ""


def _place(dump: Dump, main: Thread, workers: Sequence[Dump]) -> Place:
    found = replace(place(main.frames), counters=main.counters, loops=main.loops)
    called = _CALLS_COLLECTIVE.search(dump.lines.get(_key(main), ""))
    if not found.collective and called:
        caller = found.where.partition(" < ")[0]
        collective = called["torchs"] or called["mpis"]
        return replace(found, collective=collective, caller=caller)
    if found.collective:
        return found
    details = other_threads(main, dump.threads)
    if main.tid in dump.active:
        details.insert(0, RUNS)
    if main.has_gil:
        details.insert(0, "it holds Python's lock (GIL)")
    worker = _worker_of(dump, workers) if found.activity == LOADER else ""
    return replace(found, worker=worker, details=tuple(details[:MOST_DETAILS]))


def threads_in_collectives(main: Thread, threads: Sequence[Thread]) -> list[Place]:
    """Of the training's thread and others, if others are in collectives, too; else empty."""
    others = [
        replace(at, thread=one.name or "without a name")
        for one in threads
        if one.tid != main.tid and of_autograd(main, [one]) is None
        if (at := place(one.frames)).collective not in ("", ENDING)
        and not is_guess(at.collective)
    ]
    return [replace(place(main.frames), thread=MAIN_THREAD), *others] if others else []


def _of_dumped(
    rank: int, dumps: Sequence[Dump], workers: Sequence[Dump]
) -> Iterator[Fact]:
    last = dumps[-1]
    main = last.training
    if last.pid:
        yield Fact(rank, ProcessRank(pid=last.pid), last.cite)
    if last.form != _FAULTHANDLER:  # faulthandler writes when a process ends, too
        yield Fact(rank, Condition(conditions.RUNS), last.cite)
    yield Fact(rank, _place(last, main, workers), last.cite)
    for one in threads_in_collectives(main, last.threads):
        yield Fact(rank, one, last.cite)
    for before in dumps[:-1]:
        if before.pid == last.pid and before.form == last.form:
            by = went_on(before.training, main)
            yield Fact(rank, Motion(bool(by), by), last.cite)
            return
