"""Exceptions that ended ranks, from tracebacks in a log:
the type, its message and the user's innermost frames.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions, frame_text
from nemo_patches.tools.diagnose.rank_end import BY_HAND, MISPAIRED, Error, Frames
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition, Fact
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts

_MOST_FRAMES = 64  # of a traceback, the innermost
_MOST_LINES = 6  # of an exception's message
_PREFIX = re.compile(r"(?:\[rank\d{1,7}\]: ?){1,4}")  # launchers may write it once more
_CONTINUES = re.compile(
    r"^(?:nccl\w{1,40}: |Last error:|socketProgress|NET/|Duplicate GPU|E[A-Z]\d{4}: |Horovod has )"
)  # a message, for sure
# torch_npu's, with its rank, right beneath an exception that has none
_OF_NPU = re.compile(r"ERR\d{5} ")
_REASON = re.compile(
    r"(?<=Last error:\n).+|^(?:E[A-Z]\d{4}: |Horovod has ).+", re.MULTILINE
)
# Rich draws a frame.
_BEGINS = re.compile(r"(?:Original )?Traceback \(most recent call last\)(?::$| ?[─-])")
# torch.distributed.checkpoint: what follows, another rank has raised; all ranks pass it on.
_OF_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (\d{1,7})\)$")
_PASSED_ON = "CheckpointException"
_OF_RANKS = re.compile(r"CheckpointException ranks: ?dict_keys\(\[([\d, ]{1,2000})\]\)")
# In torchrun's table, of a function with @record; its lines are indented by two.
_TABLE_RANK = re.compile(r"^  rank      : (\d{1,7}) \(")
_IN_TABLE = "  traceback : Traceback (most recent call last):"
# What kubectl, stern and docker compose put before each line: "trainer-0  | ".
_LABEL = re.compile(
    r"(?!.{0,200}Original )([\w\[(].{0,200}?[\s:>])(?:  \+ Exception Group )?"
    r"Traceback \(most recent call last\):$"
)
# Beside an exception group
_TREE = re.compile(r"^ {2,40}(?:\+-.*|[|+] ?)")
_MOST_LABELS = 256
_FRAME = re.compile(
    r'^\s{0,8}(?:> )?File "(.{1,1000})", line (\d{1,9})(?:, in| in) (.{1,200})$'
)
_RICH_FRAME = re.compile(r"^(\S.{0,999}):(\d{1,9}) in (\S{1,200})$")
# torch puts its prefix before each line of a traceback that ends a process, and one blank before
# the last of them.
_ERROR = re.compile(
    r"^(?:  )?((?=[A-Z_]|\w{1,80}\.)(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}"
    r"(?:\(\w{1,80}\))?)(?:: (.{0,2000})|:?$)"
)
_ERROR_NAME = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|EnforceNotMet)(?:\(\w{1,80}\))?$"
)
_CAUSED = "The above exception was the direct cause of the following exception"
_MEANWHILE = "During handling of the above exception, another exception occurred"
# Words before the error that ends a program, without a rank's prefix: Hydra and
# torch.multiprocessing catch all; another program names the process.
_FATAL = re.compile(
    r"Error executing job with overrides|-- Process (?P<spawned>\d{1,7}) terminated"
    r" with the following error|"
    r"Unhandled exception .{0,200}\bproc(?:ess)? ?(?P<pid>\d{1,9})"
)
# The line before a traceback that says whose it is: "ERROR .. raised on rank 3"; not where it tells
# of another one
_WHOSE = re.compile(
    r"(?i)^(?!.*(?:failed to pass|\brank\W{0,3}(?P<one>\d{1,6})\b.*\brank\W{0,3}(?!(?P=one)\b)\d))"
    r"(?=.*(?:error|exception|fail|fatal|crash|raise|critical|\[rank \d{1,6}\]$))"
    r".*(?<![a-z])(?<!local_)(?<!local )(?<!node_)(?<!node )rank(?: ?id)?[\s:=#_-]{0,3}"
    r"(?P<rank>\d{1,6})\b"
)
# An error's words of its own rank
_OWN_RANK = re.compile(r"^Rank (\d{1,7}) successfully reached monitoredBarrier")
_RAY_TASK = re.compile(r"RayTaskError(?:\((\w{1,80})\))?: .{0,200}?\(pid=(\d{1,9})")
_OF_LOGGER = re.compile(r"\[[EWIF]\d{0,4} ")  # glog's
# What a logger writes before it: "12:00:09 | FATAL: "
_FATAL_LEVEL = re.compile(
    r"(?:[\d:.,TZ/ -]{5,30}\W{0,3})?\[?(?:FATAL|CRITICAL)\]?[:| -]{1,3}"
)
_IGNORED = re.compile(r"Exception ignored in")
# Which ends that thread, and not its process.
_IN_THREAD = re.compile(r"Exception in thread ([^\s:(]{1,80})")
# Exceptions of launchers: a rank has failed.
# I/O error, no memory, too many files, disk full, read-only, stale handle, quota: what no program
# tries out, so what it raises while it handles this is a consequence
_OF_THE_SYSTEM = re.compile(r"\[Errno (?:5|12|23|24|28|30|116|122)\]")
_OF_LAUNCHERS = re.compile(
    r"ChildFailedError|SignalException|elastic\.|RendezvousClosedError|CalledProcessError|"
    r"ProcessRaisedException|ProcessExitedException|ActorDiedError|RayActorError|KeyboardInterrupt"
)
# Caused by other ranks, or by SIGTERM, which torchrun and schedulers send to all remaining ranks.
_BY_OTHERS = re.compile(
    r"killed by signal: Terminated|SIGTERMException|SignalException|KeyboardInterrupt"
)
# That ranks found in one another.
_MISMATCHES = ("Detected mismatch", "DDP expects same model")
_CLOSED = re.compile(
    r"Connection (?:closed|reset) by|[Rr]emote process exited|ncclRemoteError|Broken"
    r" pipe|remote peer|has left|"
    r"got 0 bytes|has been shut down|Connection was likely closed|Connection"
    r" refused|ncclSystemError|ncclInternalError|"
    r"connectFullMesh failed"
)


def kind_of(error: Error) -> tuple[str, str]:
    """The condition that it tells of its rank, by whether others brought it about, and how the text
    of that begins.
    """
    # A log may end within the name: "KeyboardInter"
    is_cut = not error.message.strip() and any(
        name.startswith(error.name) for name in BY_HAND
    )
    if is_cut or _BY_OTHERS.search(f"{error.type} {error.message}"):
        return conditions.TERMINATED, ""
    if MISPAIRED.search(error.message):
        return conditions.MISPAIRED, ""
    is_mismatch = any(words in error.message for words in _MISMATCHES)
    if not is_mismatch and not error.is_of_a_collective:
        return conditions.RAISED, ""
    start = f"{conditions.AT_START}: " if error.is_of_the_start else ""
    is_closed = _CLOSED.search(error.message)
    return conditions.CUT if is_closed else conditions.WAITED, start


@dataclass
class _Error:
    """One exception of a chain."""

    type: str
    message: str
    line: Line
    frames: Frames
    lines: list[str] = field(default_factory=list)  # of its message, after the first

    @property
    def words(self) -> str:
        return "\n".join([self.message, *self.lines])

    @property
    def as_error(self) -> Error:
        return Error(self.type, self.words, self.frames)

    @property
    def text(self) -> str:
        kind, message = self.type.rpartition(".")[2], self.message.strip()
        # NCCL's and HCCL's first line is its kind, another one what happened.
        if reason := _REASON.search(self.words):
            message = f"{message.rstrip(':')}: {reason[0]}"
        return shown(f"{kind}: {message}" if message else kind)

    @property
    def where(self) -> str:
        return frame_text.where(self.frames)

    @property
    def is_group(self) -> bool:
        """Whether those that follow tell what happened."""
        return self.type.endswith("ExceptionGroup")


@dataclass
class _Writing:
    """An exception that one rank is writing. root: the exception that the others in its chain
    followed from.
    """

    frames: deque[tuple[str, str, str]] = field(
        default_factory=lambda: deque(maxlen=_MOST_FRAMES)
    )
    root: _Error | None = None
    last: _Error | None = None
    was_caused: bool = False  # the next exception is named as caused by the last
    # Without a prefix, so its lines have none of the filter's words.
    in_traceback: bool = False
    is_open: bool = False  # its error is to come
    has_frames: bool = False  # since the last exception
    was_over: bool = False  # it began after a time-out, or an end, of others
    thread: str = ""  # that it ended, if it is not the main one
    of: int = NOT_TOLD  # the rank that has raised it, where another one passes it on


class ExceptionLines:
    """One launch's exceptions. In a file of many ranks, those without a prefix count only if they
    end a process.
    """

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._writing: dict[int, _Writing] = {}
        # By rank, the last that was written without a prefix.
        self._stray: dict[int, _Writing] = {}
        # By writer, the rank that what is being written without a prefix ended.
        self._fatal: dict[int, int] = {}
        self._skips = 0  # lines
        self._before = ""  # the line before
        self._labels: list[re.Pattern[str]] = []  # before lines of containers
        self._table_rank = NOT_TOLD
        # Which process it was that torch.multiprocessing had started.
        self._spawned = ""
        # By rank, what others say that it has raised.
        self._raised_elsewhere: dict[int, _Error] = {}

    @property
    def is_reading(self) -> bool:
        """Whether lines without any of the filter's words may follow."""
        return any(one.in_traceback for one in self._writing.values())

    @property
    def goes_on(self) -> bool:
        """Whether lines of one may follow, with a rank's prefix or without."""
        return any(one.in_traceback or one.is_open for one in self._writing.values())

    @property
    def count(self) -> int:
        """Of those that are not told so far: more lines of them may come."""
        return len(self._writing) + len(self._stray)

    def take(self, line: Line) -> None:
        prefix = _PREFIX.search(line.text) if "[rank" in line.text else None
        if prefix is not None:
            self._take(line.rank, line, line.text[prefix.end() :])
            return
        key = line.rank  # NOT_TOLD: lines without a prefix in a file of many ranks
        text = self._without_label(line.text)
        before, self._before = self._before, text
        stray = self._writing.get(NOT_TOLD)
        if line.has_prefix and stray and stray.last and _OF_NPU.match(text):
            if line.number == stray.last.line.number + 1:
                self._fatal[NOT_TOLD] = line.rank
            return
        if fatal := _FATAL.search(text):
            self._end(key)
            pid, spawned = int(fatal["pid"] or 0), fatal["spawned"]
            self._fatal[key] = self._found.rank_of_pid.get(pid, line.rank)
            # Its rank on one host.
            self._spawned = f", in spawned process {spawned}" if spawned else ""
        elif _IGNORED.search(text):
            self._skips = 60
        elif in_table := _TABLE_RANK.match(text):
            self._table_rank = int(in_table[1])
        elif text == _IN_TABLE:
            self._end(key)
            self._fatal[key] = self._table_rank
            writing = self._anew(key)
            writing.of = self._table_rank
            writing.in_traceback = True
            writing.was_over = False
        elif self._skips and key not in self._writing:
            self._skips -= 1
            if text and not text[0].isspace() and not _BEGINS.search(text):
                self._skips = 0
        elif ray := _RAY_TASK.search(text):
            self._end(key)
            self._fatal[key] = self._found.rank_of_pid.get(int(ray[2]), NOT_TOLD)
            self._anew(key).in_traceback = True
        else:
            whose = _WHOSE.match(before) if _BEGINS.match(text) else None
            if whose and not self._is_inner(key):
                self._end(key)
                self._fatal[key] = int(whose["rank"])
            self._take(key, line, text)

    def _is_inner(self, key: int) -> bool:
        """Whether what follows belongs to the exception that is being written."""
        writing = self._writing.get(key)
        return writing is not None and (writing.was_caused or writing.last is None)

    def _without_label(self, text: str) -> str:
        """Without what is before each line of a container's."""
        for label in self._labels:
            if found := label.match(text):
                return text[found.end() :]
        found = _LABEL.match(text)
        if found is None or len(self._labels) >= _MOST_LABELS:
            return text
        any_time = re.sub(r"\d+", r"\\d+", re.escape(found[1]))
        self._labels.append(re.compile(any_time))
        return text[found.end(1) :]

    def _take(self, key: int, line: Line, text: str) -> None:
        """One line of a rank, without its prefix."""
        writing = self._writing.get(key)
        if text.startswith(("│", "|")):
            text = text.strip("│| ")
        text = _TREE.sub("", text)
        thread, of_rank = _IN_THREAD.search(text), _OF_RANK.search(text)
        if thread or of_rank:
            self._end(key)
            begun = self._anew(key)
            begun.thread = shown(thread[1]) if thread else ""
            begun.of = int(of_rank[1]) if of_rank else NOT_TOLD
            begun.in_traceback = not line.has_prefix
        # Another thread's line, such as the watchdog's: no part of a message.
        elif _OF_LOGGER.match(text):
            self._end(key)
        elif _BEGINS.search(text):
            self._begin(key, line, text)
        elif writing is not None:
            self._go_on(writing, line, text)
        elif (
            key >= 0
            and (error := _ERROR.match(_FATAL_LEVEL.sub("", text, count=1)))
            and _ERROR_NAME.search(error[1])
        ):
            self._raise(self._anew(key), error, line)

    def _anew(self, key: int) -> _Writing:
        """Not kept where there are too many already."""
        begun = _Writing(was_over=self._found.is_over)
        if len(self._writing) < MOST_KEPT:
            self._writing[key] = begun
        return begun

    def _begin(self, key: int, line: Line, text: str) -> None:
        writing = self._writing.get(key)
        # Of a data loader's worker, or a task: beneath the frames that waited for it
        last = writing.last if writing else None
        is_inner = "Original" in text or (last is not None and last.is_group)
        if writing and writing.last and not is_inner and not writing.was_caused:
            self._end(key)  # of another exception
            writing = None
        writing = writing or self._anew(key)
        writing.in_traceback = not line.has_prefix
        writing.is_open = True
        if not is_inner:
            writing.frames.clear()

    def _go_on(self, writing: _Writing, line: Line, text: str) -> None:
        awaits = writing.last is None or writing.last.is_group
        if frame := _FRAME.match(text) or _RICH_FRAME.match(text):
            writing.frames.append((frame[1], frame[2], frame[3]))
            # Others, a message quotes.
            writing.has_frames = awaits or writing.is_open
        elif _CAUSED in text or _MEANWHILE in text:
            writing.was_caused = True
            if (
                _MEANWHILE in text
                and (root := writing.root)
                and root is writing.last
                and not root.as_error.is_of_a_collective
                and not _OF_THE_SYSTEM.match(root.message)
            ):
                # Of an exception while handling another one, the later ended the process
                writing.root = None
        elif (error := _ERROR.match(text)) and (
            writing.has_frames or (awaits and _ERROR_NAME.search(error[1]) is not None)
        ):
            self._raise(writing, error, line)
        elif writing.last is None or text[:1].isspace():
            return
        elif (
            len(writing.last.lines) < _MOST_LINES
            and text
            and (line.has_prefix or _CONTINUES.search(text))
        ):
            writing.last.lines.append(text)
        else:
            writing.in_traceback = False

    def _raise(self, writing: _Writing, error: re.Match[str], line: Line) -> None:
        found = _Error(error[1], error[2] or "", line, tuple(reversed(writing.frames)))
        last = writing.last
        is_inner = last is not None and (last.is_group or "Caught " in last.message)
        if writing.was_caused:
            is_inner = False
        if writing.root is None or is_inner:
            writing.root = found
        writing.last, writing.was_caused, writing.has_frames = found, False, False
        writing.is_open = False
        writing.in_traceback = not line.has_prefix

    def _end(self, key: int) -> None:
        writing = self._writing.pop(key, None)
        if writing is None or writing.root is None:
            return
        if writing.thread:
            text = f"{writing.root.text}, in its thread {writing.thread}"
            self._found.add(
                key,
                Condition(conditions.THREAD, text, writing.root.where),
                writing.root.line,
            )
            return
        if key >= 0 and writing.root.line.has_prefix:
            self._tell(key, writing)
            return
        if key in self._fatal:
            self._tell(self._fatal.pop(key), writing)
            return
        if not _OF_LAUNCHERS.search(writing.root.type):
            self._stray[key] = writing

    def _tell(self, rank: int, writing: _Writing) -> None:
        error = writing.root
        if error and writing.last and not error.words.strip():
            error = writing.last  # "queue.Empty" alone says nothing
        if error is not None and error.type.endswith(_PASSED_ON):
            self._pass_on(rank, error)
            return
        if error is None or _OF_LAUNCHERS.search(error.type):
            if error is not None and _BY_OTHERS.search(error.type) and rank >= 0:
                self._found.add(
                    rank, Condition(conditions.TERMINATED, error.text), error.line
                )
            return
        if rank == NOT_TOLD and (own := _OWN_RANK.match(error.message)):
            rank = int(own[1])
        details = tuple(shown(one) for one in error.lines[-3:] if one.strip())
        kind, start = kind_of(error.as_error)
        text = f"{start}{error.text}"
        if kind == conditions.RAISED and writing.was_over:
            kind = conditions.FAILED
            if not error.line.has_prefix and writing.of == NOT_TOLD:
                # By another stream: which was first is not known
                kind = conditions.LOGGED
            text += ", after a time-out or an end of others"
        elif kind == conditions.RAISED:
            text += self._spawned
        self._spawned = ""
        condition = Condition(kind, text, error.where, details)
        if writing.of != NOT_TOLD:
            self._found.keep(
                Fact(writing.of, condition, error.line.cite, own=writing.of == rank)
            )
        else:
            self._found.add(rank, condition, error.line)

    def _pass_on(self, rank: int, error: _Error) -> None:
        """A rank reports what others have raised in a checkpoint that all ranks write."""
        if (raised := _OF_RANKS.search(error.words)) is None:
            return
        others = [int(one) for one in raised[1].split(",") if one.strip().isdigit()]
        text = f"what {named(others)} raised, in a checkpoint of all ranks"
        for other in others:
            self._raised_elsewhere.setdefault(other, error)
        if rank not in others:
            self._found.add(rank, Condition(conditions.PASSED_ON, text), error.line)

    def finish(self) -> None:
        """Call after the launcher's: an exception without a prefix ended a rank only if the
        launcher saw that fail.
        """
        for key in list(self._writing):
            self._end(key)
        # Of ranks whose own exception no line shows
        what = "an exception in a checkpoint of all ranks"
        for rank, error in self._raised_elsewhere.items():
            if not self._found.has(rank, conditions.RAISED):
                raised = Condition(conditions.RAISED, what, error.where)
                self._found.keep(Fact(rank, raised, error.line.cite, own=False))
        for rank, writing in self._stray.items():
            root = writing.root
            if root is None:
                continue
            if self._may_have_ended(rank) or root.as_error.is_of_a_collective:
                self._tell(rank, writing)
            else:
                logged = Condition(conditions.LOGGED, root.text, root.where)
                self._found.add(rank, logged, root.line)

    def _may_have_ended(self, rank: int) -> bool:
        """Whether the launcher reports an exit code that may be this rank's, as an exception leaves
        one.
        """
        facts = [fact for fact in self._found.facts.values() if fact.condition_kind]
        failed = {
            fact.rank
            for fact in facts
            if fact.condition_kind == conditions.FAILED and not fact.own
        }
        if rank == NOT_TOLD:
            kinds = {fact.condition_kind for fact in facts}
            explained = kinds & {conditions.KILLED, conditions.RAISED}
            return failed == {NOT_TOLD} and not explained
        own = {fact.condition_kind for fact in facts if fact.rank == rank}
        return (rank in failed and own == {conditions.FAILED}) or (
            failed == {NOT_TOLD} and not own
        )
