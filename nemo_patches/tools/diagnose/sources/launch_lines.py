"""One launch of a job: each line goes through the table of rows, and to what reads tracebacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition, Evidence
from nemo_patches.tools.diagnose.sources.c10d_lines import C10dLines
from nemo_patches.tools.diagnose.sources.encoder_prints import EncoderPrints
from nemo_patches.tools.diagnose.sources.exception_lines import ExceptionLines
from nemo_patches.tools.diagnose.sources.gpu_lines import GpuLines
from nemo_patches.tools.diagnose.sources.hearsay_lines import (
    HearsayLines,
    is_no_event,
)
from nemo_patches.tools.diagnose.sources.launcher_lines import LauncherLines
from nemo_patches.tools.diagnose.sources.lines import (
    ANY_DIGIT,
    LOCAL_RANK_OF_COMMAND,
    MOST_KEPT,
    RANK_OF_COMMAND,
    WRITER,
    Line,
    ranks_in,
    shown,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.place_lines import PlaceLines
from nemo_patches.tools.diagnose.sources.ras_lines import RasLines
from nemo_patches.tools.diagnose.sources.rows import OURS, ROWS, Row
from nemo_patches.tools.diagnose.sources.stall_lines import StallLines

_MOST_SHAPES = 1 << 9  # of lines
_FEW_LINES = 4  # of a process's variables
# Of Kubernetes' objects, whose namespace stands beneath their name
_NAMED = re.compile(r"\s*['\"]?[Nn]ame['\"]?: +['\"]?([a-z][\w.-]{0,200})")
_NAMESPACE = re.compile(r"\s*['\"]?[Nn]amespace['\"]?: ")
_DESCRIBED = re.compile(
    r"\S{0,80} ?[$#] kubectl\b.{0,200} describe pods?[ /](?P<name>[a-z][\w.-]{0,200})"
)
# Of its environment, as described or in YAML: its rank, and of how many
_IN_ENVIRONMENT = re.compile(
    r"\s*(?:-\s*)?(?:name:\s*)?(?:(?P<rank>RANK|PROCESS_INDEX|PROCESS_ID|JAX_PROCESS_ID)|"
    r"(?P<size>WORLD_SIZE|PROCESS_COUNT|NUM_PROCESSES|JAX_NUM_PROCESSES))"
    r"(?::|,? *value:)\s+['\"]?(?:(?P<value>\d{1,6})\b|.*\[['\"].{0,80}completion-index['\"]\])"
)
# So a pod starts several ranks, and its own number is no rank.
_SEVERAL = re.compile(r"\s*(?:[\w.]+/gpu|\w*NPROC_PER_NODE):\s+['\"]?(?:[2-9]|\d\d)")
_INDEX = re.compile(r".{0,200}\bjob-completion-index\s?[=:]\s?['\"]?(\d{1,6})\b")
_TOLD_OF_IT = re.compile(
    r"\s*(?:['\"]?(?:[Rr]eason|[Mm]essage|[Ee]xit ?[Cc]ode)['\"]?:|Warning\s{2}) ?"
)
_IP = re.compile(r"\bip=([\d.]{7,15})\b")
# A message of torch_npu's: only its first line has the rank before it
_OF_NPU = re.compile(r"ERR\d{5} ")
_MORE_OF_NPU = re.compile(r"E[A-Z]\w{4}: |\t| {8}")
_RANK = re.compile(r"(?<!\w)RANK=(\d{1,6})\b")  # of an environment
_OF_ROWS = ("condition", "end", "report")  # readers of several rows


class Launch:
    """What the lines of one launch tell."""

    def __init__(self) -> None:
        self.found = LaunchFacts()
        self.ends = LauncherLines(self.found)
        self.tracebacks = ExceptionLines(self.found)
        self._c10d = C10dLines(self.found)
        self._stalls = StallLines(self.found)
        self._ras = RasLines(self.found)
        self._gpus = GpuLines(self.found)
        self._prints = EncoderPrints()
        self._by_file: list[set[int]] = []  # for each file, the ranks of its lines
        self._hearsay = HearsayLines(self.found)
        self._places = PlaceLines(self.found, self._hearsay.tables)
        self._text_before = ""
        self._object = ""  # of Kubernetes, that the file describes
        self._index = NOT_TOLD  # of that, in its job
        self._mapped = ""  # node
        # Of pods by name, the rank in their environment; of how many the last one is; and those
        # that start several ranks
        self._ranks_of_pods: dict[str, int] = {}
        self._pods = 0
        self._several: set[str] = set()
        self._of_processes: set[str] = set()  # whose number is a process's all the same
        self._of_npu = NOT_TOLD  # whose message torch_npu is writing
        self._first: Line | None = None
        self._last: Line | None = None
        self._pid, self._pid_at = 0, 0  # of which variables may follow, and its line
        self._rows = [(row, self._reader_of(row)) for row in ROWS]

    def _reader_of(self, row: Row) -> Callable[[re.Match[str], Line], None]:
        """The method that its row names, of whichever class has it."""
        tables = self._hearsay.tables
        owners = (self, self._c10d, self.ends, self._ras, tables, self._gpus)
        name = f"take_{row.reader}"
        reader = next(getattr(one, name) for one in owners if hasattr(one, name))
        return partial(reader, row) if row.reader in _OF_ROWS else reader

    def never_began(self, few: int) -> bool:
        """Whether it was ended from outside before its ranks said much. few: lines."""
        if self._first is None or self._last is None:
            return True
        is_from_outside = self.found.kinds <= {conditions.TERMINATED, conditions.HINT}
        return is_from_outside and self._last.number - self._first.number < few

    @property
    def has_trouble(self) -> bool:
        return bool(self.tracebacks.count or self.found.kinds - {conditions.HINT})

    def begin_file(self) -> None:
        self.found.is_over = False
        self._object = ""
        self._of_npu = NOT_TOLD
        self._by_file.append(set())

    def take(self, line: Line) -> None:
        self._first = self._first or line
        self._last = line
        if line.has_prefix and len(self._by_file[-1]) < MOST_KEPT:
            self._by_file[-1].add(line.rank)
            self._hearsay.is_there(line.rank)
        if "nemo_patches " in line.text and (ours := OURS.search(line.text)):
            self._stalls.take(ours, line)
            return
        line = self._of_object(line)
        line = self._with_rank_of_npu(self._with_rank_of_pid(line))
        text_before, self._text_before = self._text_before, line.text
        if is_no_event(line.text, text_before):
            return
        is_in_traceback = self.tracebacks.goes_on or "Traceback (most" in line.text
        self._prints.take(line, is_in_traceback)
        self._c10d.take_step(line)
        self.ends.take_step(line.text)
        before = len(self.found.facts)
        is_end = self._apply_rows(line)
        self.tracebacks.take(line)
        is_known = is_end or len(self.found.facts) > before
        self._hearsay.take(line, is_known or self.tracebacks.is_reading)
        if not is_known and not self.tracebacks.is_reading:
            self._places.take(line)

    def _of_object(self, line: Line) -> Line:
        """With the name that stands above what is told of it."""
        name = _DESCRIBED.match(line.text) if "kubectl" in line.text else None
        if _NAMESPACE.match(line.text):
            name = _NAMED.match(self._text_before)
        if name and name[1] != self._object:
            self._object, self._index = name[1], NOT_TOLD
        if self._object:
            self._take_environment(line.text)
        if self._object and _TOLD_OF_IT.match(line.text):
            return line._replace(text=f"[{self._object}] {line.text.strip()}")
        return line

    def _take_environment(self, text: str) -> None:
        if index := _INDEX.match(text):
            self._index = int(index[1])
        if _SEVERAL.match(text):
            self._several.add(self._object)
        # In YAML the value is in the line beneath.
        is_value = text.lstrip().startswith("value:")
        told = _IN_ENVIRONMENT.match(
            f"{self._text_before} {text}" if is_value else text
        )
        if told is None:
            return
        value = self._index if told["value"] is None else int(told["value"])
        if told["size"]:
            self._pods = value
        elif value != NOT_TOLD and len(self._ranks_of_pods) < MOST_KEPT:
            self._ranks_of_pods[self._object] = value
            if told["rank"] != "RANK":
                self._of_processes.add(self._object)

    def _name_pods(self) -> None:
        """Where a pod starts several ranks, the number in its environment is a node's."""
        size = max(self.found.world_size, 1 + max(self.found.ranks(), default=NOT_TOLD))
        if self._several <= self._of_processes and size <= self._pods:
            self.found.note_names({pod: {r} for pod, r in self._ranks_of_pods.items()})
            self.found.has_size(self._pods)

    def _with_rank_of_pid(self, line: Line) -> Line:
        """Ray and others write the process before its lines, and its rank once."""
        known = self.found.rank_of_pid
        writer = WRITER.match(line.text) if known else None
        rank = known.get(int(writer["pid"]), NOT_TOLD) if writer else NOT_TOLD
        if writer is None or rank < 0 or line.has_prefix:
            return line
        return line._replace(text=line.text[writer.end() :], rank=rank, has_prefix=True)

    def _with_rank_of_npu(self, line: Line) -> Line:
        if line.has_prefix or not _MORE_OF_NPU.match(line.text):
            self._of_npu = line.rank if _OF_NPU.match(line.text) else NOT_TOLD
        elif self._of_npu >= 0 and not self.tracebacks.is_reading:
            return line._replace(rank=self._of_npu, has_prefix=True)
        return line

    def _apply_rows(self, line: Line) -> bool:
        """Whether a row of an end knows the line."""
        text, is_end = line.text, False
        for number in _rows_with_words_in(text.translate(ANY_DIGIT)):
            row, read = self._rows[number]
            if (row.is_end and is_end) or (
                row.of_rank and not row.is_end and line.rank < 0
            ):
                continue
            if found := row.pattern.search(text):
                read(found, line)
                is_end |= row.is_end
        return is_end

    def take_condition(self, row: Row, found: re.Match[str], line: Line) -> None:
        told = found.groupdict("")
        if row.kind == conditions.RAISED and self.found.is_over:
            return
        if "size" in told:
            self.found.has_size(told["size"])
        words = {name: shown(text) for name, text in told.items()}
        condition = Condition(row.kind, row.text.format(**words).removeprefix(": "))
        if "peer" in told:  # lines before did not name it
            self.found.facts.pop((line.rank, Condition, row.kind, ""), None)
        ranks = ranks_in(told.get("ranks", "")) or [int(told.get("rank") or line.rank)]
        # NCCL's are the communicator's; the job's if the first agrees with the line's
        if "second" in told and line.rank in (NOT_TOLD, int(told["first"])):
            ranks = [int(told["first"]), int(told["second"])]
        for rank in ranks:
            self.found.add(rank, condition, line, own=row.own)

    def take_left_out(self, found: re.Match[str], line: Line) -> None:
        self.found.missing_lines = True

    def take_size(self, found: re.Match[str], line: Line) -> None:
        self.found.has_size(found[1])

    def take_mapped_node(self, found: re.Match[str], line: Line) -> None:
        """Of the map that mpirun shows: a node, and in the lines beneath its ranks."""
        self._mapped = found[1]

    def take_mapped_rank(self, found: re.Match[str], line: Line) -> None:
        if self._mapped and len(self.found.ranks_of_name) < MOST_KEPT:
            self.found.note_names({self._mapped: {int(found[1])}})

    def take_address(self, found: re.Match[str], line: Line) -> None:
        self.found.note_address(found[1], line.rank)

    def take_over(self, found: re.Match[str], line: Line) -> None:
        self.found.is_over = True

    def take_pid(self, both: re.Match[str], line: Line) -> None:
        pid = both[1] or both[4] or both[5] or both[8]
        rank = both[2] or both[3] or both[6] or both[7]
        self.found.note_pid(int(pid), int(rank))
        addresses = _IP.findall(line.text)[-1:]  # behind that of who writes the line
        if len(self.found.ranks_of_name) < MOST_KEPT:
            self.found.note_names({one: {int(rank)} for one in addresses})
        self.found.has_size(both[9] or 0)

    def take_environment(self, found: re.Match[str], line: Line) -> None:
        if found["next"]:
            self._pid, self._pid_at = int(found["next"]), line.number
            return
        is_near = line.number - self._pid_at < _FEW_LINES
        pid = int(found["pid"] or (self._pid if is_near else 0))
        local = LOCAL_RANK_OF_COMMAND.search(line.text)
        # What Slurm has started may be torchrun, of several ranks.
        of_all = None if local else RANK_OF_COMMAND.search(line.text)
        rank = _RANK.search(line.text) or of_all
        if pid and rank:
            self.found.note_pid(pid, int(rank[1]))
            self.found.has_size(int(rank[1]) + 1)
        elif pid and local and len(self.found.listed) < MOST_KEPT:
            self.found.listed[pid] = int(local[1])

    def finish(self, evidence: Evidence) -> None:
        self._stalls.finish()
        self._gpus.name_processes()
        self.ends.finish()
        self.tracebacks.finish()
        self.found.tell_ranks_of_faults()
        self.found.tell_ranks_of_blocked(self._prints.seen)
        self._ras.finish()
        self._gpus.name_hosts()
        self._name_pods()
        self._hearsay.finish(self.ends.is_finished)
        if not self.ends.is_finished:
            self._places.finish()
        self.ends.leave_out_woken()
        self.found.leave_out_lines_of_ranks()
        self.found.tell_who_closed()
        self.found.tell_ranks_of_named()
        if self.found.several_hosts:
            self._prints.leave_out_labels()
        self._gpus.finish(self.ends.is_finished)
        evidence.printed |= self._prints.printed
        evidence.ran_out |= self._prints.ran_out
        evidence.alone |= self._prints.alone
        self._c10d.finish(evidence, self._by_file)
        self.ends.leave_out_overcome()
        not_told = self.found.without_local_ranks()
        for ranks in evidence.groups.values():
            ranks -= not_told
        if not self.ends.is_finished and not self.ends.has_succeeded:
            told = self._prints.finding(), self._hearsay.tables.finding()
            more = (*told, *self._ras.findings)
            evidence.findings += filter(None, more)


@lru_cache(_MOST_SHAPES)
def _rows_with_words_in(shape: str) -> tuple[int, ...]:
    """shape: a line without its digits, as lines of many ranks have it in common."""
    return tuple(
        number
        for number, row in enumerate(ROWS)
        if any(word.translate(ANY_DIGIT) in shape for word in row.words)
    )
