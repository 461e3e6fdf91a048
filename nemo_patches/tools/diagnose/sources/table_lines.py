"""Tables with a row for each rank, as ps, monitors and profilers print them.

They are read by the words of their heads, or of their rows ("rank 3: step 811, age 2 s"). One rank
that is apart from all others, which are alike, is told: by its state, behind in steps, long
unheard, or slow. Where several differ, or values are close, nobody is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.conditions import HINT, STOPPED, TOLD_APART, TOLD_DEAD
from nemo_patches.tools.diagnose.findings import Finding
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition
from nemo_patches.tools.diagnose.sources.lines import (
    ANY_DIGIT,
    BEFORE_MESSAGE,
    LOCAL_RANK_OF_COMMAND,
    MOST_KEPT,
    RANK_OF_COMMAND,
    WRITER,
    Line,
    shown,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.verdicts import finding, parties

# Of the best rank's throughput: ranks on one kind of GPU differ by some %
_LEAST_SHARE = 0.5
_MOST_UNLIKE = 1.5  # the most by the least of values that are alike
_LEAST_AGE_S, _LEAST_AGE = 30.0, 5  # of a heartbeat that is old, and by the others'
_LEAST_RANKS = 3  # of which one is apart by a number
_NEAR = 8  # lines: what a table is of stands before it

# "Loading checkpoint shards:  56%|####  | 9/16 [03:24<03:16"; and the use of a GPU, which
# nvidia-smi tells in the line beneath its number
_BAR = re.compile(
    r"(?P<title>\w[^%]{0,80}?)\s{0,8}\d{1,3}%.{0,80}?[|\s](?P<done>\d{1,9})/(?P<total>\d{1,9})\b|"
    r"[|,] +(?P<use>\d{1,3}) ?% +(?:Default|Exclu|E\. Pro|\|)"
)
_GPU = re.compile(
    r"[|\[] {0,4}(\d{1,2})\]? +(?:NVIDIA|GeForce|Tesla|Quadro|[AHBL]\d{2})"
)
# Of nvidia-smi dmon, pmon and --query-gpu: their heads, and rows; and its list of processes
_GPU_HEAD = re.compile(r"#? {0,4}(?:gpu|index)\b[ ,].*\b(?:sm|utilization\.gpu)\b")
_GPU_ROW = re.compile(
    r"\s{0,8}\d{1,2}(?:,? +(?:[\w.-]+(?: ?[%A-Za-z]{1,3}(?=,|$))?)){1,20}$"
)
_GPU_PROCESS = re.compile(
    r"\| {1,6}(?P<gpu>\d{1,2}) (?:.{0,20} )?(?P<pid>\d{2,9}) +[CGM+]{1,3} "
)
_IDLE, _BUSY = 5, 90  # % of a GPU's use
# What a column has, by its name in small letters with "_" between its words. A part of a step
# counts beside its phases.
_ROLES = re.compile(
    r"(?P<rank>(?:global_|world_|mpi_|dist_|slurm_)?(?:rank|procid)(?:_id)?s?)|"
    r"(?P<number>(?:worker|task|process|proc|replica|trainer|learner)(?:_id)?)|"
    r"(?P<pid>pid)|(?P<command>command|cmd|args)|(?P<state>stat|s|state|status|health)|"
    r"(?P<rate>.*throughput.*|.*tflops?.*|.*(?:tok\w*|samples?|it|steps?|utts?)_s(?:ec)?)|"
    r"(?P<age>(?:.*_)?(?:age|silent|heartbeat|beat|hb|last_seen)(?:_.*)?)|"
    r"(?P<wait>(?=.*(?:ms|sec|time|us|s)$).*(?:wait|comm|sync|nccl|reduce|idle).*)|"
    r"(?P<time>(?:.*_)?(?:ms|sec|us|latency)(?:_.*)?|(?:step|iter|batch|data|load)_(?:time|s))|"
    r"(?P<phase>fwd|forward|bwd|backward|compute)|(?P<part>data|total|load|loading)|"
    r"(?P<step>(?:(?:last|global|train|current)_)?(?:step|batch|iter|iteration|seqnum|update)|"
    r"last_(?:batch|seq)|batch_idx|(?:step|iter|batch)_(?:no|num|done))"
)
_OF_RANK = {"rank", "number", "command", "pid"}
_OF_HANGS = {"state", "step", "age"}
_OF_SLOWNESS = {"wait", "time", "rate", "phase"}
_NUMBERS = {"step", "age", "wait", "time", "rate"}
_MAY_BE_HEAD = re.compile(
    r"(?i)(?:rank|procid|\b(?:pid|worker|task|process|replica|trainer))(?:_id)?s?\b(?! ?[=:#]? ?\d)"
)
WORDS_OF_A_HEAD = (
    "rank  ",
    "rank\t",
    "rank |",
    "rank │",
    "rank,",
    "RANK",
    "PROCID",
    "STAT",
    "State:\t",
)
_RULE = re.compile(r"[\s|│+=:─┌┬┐├┼┤└┴┘╞╪╡-]*")
_SPLITS = (r"\s*[|│]\s*", r"\s*,\s*", r"\s{2,}|\t", r"\s+")
_VALUE = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ])?(?P<hours>\d\d):(?P<minutes>\d\d):(?P<seconds>\d\d(?:\.\d{1,9})?)Z?|"
    r"(?P<number>\d{1,15}(?:\.\d{1,9})?)\s?(?P<unit>ms|s|sec\w*|m|min\w*|h|hours?)?(?: ago)?"
)
_UNITS = {"ms": 1e-3, "m": 60.0, "mi": 60.0, "h": 3600.0, "ho": 3600.0}
_NUMBER = re.compile(r"[A-Za-z_ -]{0,12}(\d{1,6})(?:/\d{1,6})?")
# Rows that name what they have
_KEYED_RANK = re.compile(r"\b[Rr]ank['\"]?[ =:#]{1,2}(\d{1,6})\b")
_KEYED = re.compile(
    r"\b(?P<key>(?:last )?[A-Za-z_]{2,30}|ms)['\"]?[ =:]{1,3}['\"]?(?P<value>\d\d:\d\d:\d\d|"
    r"\d[\d.]*(?: ?(?:ms|s|sec\w*|min\w*|m|h)\b)?)|"
    r"\b(?P<state>stat(?:e|us)?)['\"]?[ =:]{1,3}['\"]?(?P<word>[A-Za-z]+)"
)
# "rank   2 =        nan": one value, beneath an error that says that ranks differ
_CELL = re.compile(
    r"\W{0,4}[Rr]ank[\s:#]{0,4}(\d{1,6})\]?\s?[=:]\s{0,12}([-+\w.]{1,40})"
)
_OF_UNLIKE = re.compile(
    r"inconsisten|\bdiffer|mismatch|diverge|\bunlike|not (?:equal|identical)"
)
# One line: "step time by rank (ms): 0: 355, 1: 351, 2: 1553"
_LISTED = re.compile(
    r"(?<![\w:.-])(?:r(?:ank)?[ _-]?)?(\d{1,5})\s?[:=]\s?(\d[\d.]*(?: ?(?:ms|s)\b)?)"
    r"(?=[,;})\]\s]|$)"
)
_OF_SLOW_RANKS = re.compile(r"(?i)straggl|profil|slow|\bavg|mean|median|p50")
# A process's state, as the kernel names it
_STATES = re.compile(
    r"(?P<runs>[RSI][sl+<NLn]{0,5}|(?i:running|sleeping))|"
    r"(?P<asleep>D[sl+<NLn]{0,5}|(?i:disk[ -]sleep))|"
    r"(?P<stopped>[Tt][sl+<NLn]{0,5}|(?i:stopped))|"
    r"(?P<ended>[ZX][sl+<NLn]{0,5}|(?i:zombie|defunct))"
)
# ps without its head, or with -f, which has no state; and /proc/PID/status, in two lines
_PROCESS = re.compile(
    r"\s{0,8}(?:[a-z]\w{0,31}\s+)?(?P<pid>\d{2,9})\s(?:.{0,80}?\s)??"
    r"(?:(?P<state>[DTtZRS][sl+<NLn]{0,5})|(?:\?|pts/\d{1,5}|tty\w{1,5})\s+[\d:-]{8,12})"
    r"\s(?P<command>.*(?:\bpython|\[pt_).*)"
)
_STATUS = re.compile(
    r"\s{0,8}(?:State:\s+(?P<state>[A-Zt])\b|Pid:\s+(?P<pid>\d{1,9})$)"
)
_FILE_SYSTEMS = re.compile("nfs|rpc|fuse|lustre|cl_sync|ceph|gpfs|cifs")
_OF_A_HANG = re.compile(  # in small letters
    r"\bhang|\bhung|stall|stuck|deadlock|no step|without a step|timed? ?out|no progress"
)


# Whom a table shows apart: the rank, the condition, what that needs to count, and what is told;
# empty: the row.
_Apart: TypeAlias = tuple[int, str, str, str]
A_HANG = "a hang"


@dataclass
class _Table:
    """names: of its columns; split: what is between them, a pattern; empty: its rows have them.
    rows: by rank, by the columns' names.
    """

    names: Sequence[str] = ()
    split: str = ""
    is_of_a_hang: bool = False
    rows: dict[int, Mapping[str, str]] = field(default_factory=dict)
    lines: dict[int, Line] = field(default_factory=dict)

    def columns(self, *roles: str) -> dict[str, dict[int, str]]:
        """By name, their cells by rank."""
        return {
            name: {rank: row[name] for rank, row in self.rows.items()}
            for name in self.names
            if _role_of(name) in roles
        }

    def add(self, rank: int, row: Mapping[str, str], line: Line) -> None:
        if rank != NOT_TOLD and len(self.rows) < MOST_KEPT:
            told = ", ".join(f"{name} {cell}" for name, cell in row.items())
            told = told if self.split else f"rank {rank}, {told}"
            self.rows[rank] = row
            self.lines[rank] = line._replace(text=told)


class TableLines:
    """One launch's lines. state_of: the condition that a cell's words tell. tell: of whom is apart
    in a table that has ended; is_there: of others.
    """

    def __init__(
        self,
        found: LaunchFacts,
        state_of: Callable[[str], str],
        tell: Callable[[list[int], str, Line, str], None],
        is_there: Callable[[int], None],
    ) -> None:
        self._found = found
        self._state_of = state_of
        self._tell = tell
        self._is_there = is_there
        self._table = _Table()
        self._processes = _Table(["state"])
        self._state = ""  # of the process whose id follows
        self._process = ("", 0)  # the last one's id, and its line
        self._defunct: list[Line] = []  # processes whose ranks are not told
        # By id, likewise: their last states, and the lines
        self._unranked: dict[int, tuple[str, Line]] = {}
        self._traced = 0  # the last process that strace has come to
        self._stopped: dict[int, Line] = {}  # by id, says strace
        self._hang_at = -_NEAR  # number of the last line that speaks of one
        self._unlike_at = -_NEAR  # likewise, of ranks that differ
        self._cells: dict[int, str] = {}
        self._head: Line | None = None  # before them
        # By title, total and writer, what was done by the last line
        self._bars: dict[tuple[str, str, str], tuple[int, Line]] = {}
        self._writer = ""  # of the line before
        self._slow: Finding | None = None
        self._gpu_head: list[str] = []  # of a table of GPUs
        # By GPU: its uses, and the last line; its process
        self._uses: dict[int, tuple[list[int], Line]] = {}
        self._gpu_pids: dict[int, int] = {}

    def take_throughput(self, found: re.Match[str], line: Line) -> None:
        """Megatron's: the least throughput and its rank, the most and its rank."""
        least, slow, most, best = found.groups()
        self._slow = None
        if float(least) < _LEAST_SHARE * float(most):
            text = f"{least} TFLOP/s, and rank {best} has {most}"
            self._note_slow(int(slow), text, line)

    def _note_slow(self, rank: int, text: str, line: Line) -> None:
        text = (
            f"Rank {rank} is slow: {text}, by the job's straggler report [{line.cite}]."
        )
        self._slow = finding(ids.STRAGGLER, text, [rank])

    def finding(self) -> Finding | None:
        return self._slow

    def take(self, line: Line) -> bool:
        """Whether it is a row beneath a head."""
        text = line.text
        if "ank" in text and (cell := _CELL.fullmatch(_message(line))):
            if len(self._cells) < MOST_KEPT:
                self._cells[int(cell[1])] = cell[2]
            return False
        self._end_cells()
        self._head = line
        self._take_bar(line)
        self._take_gpu(line)
        if _OF_UNLIKE.search(text):
            self._unlike_at = line.number
        if self._table.split:
            if _RULE.fullmatch(text):
                return bool(text)
            if self._take_row(line):
                return True
        if self._take_process(line):
            return True
        is_of_a_hang, may_be_row, may_begin = _looks_of(text.translate(ANY_DIGIT))
        if may_be_row and self._take_keyed(line):
            return False
        self.end()
        if is_of_a_hang:
            self._hang_at = line.number
        if may_begin and not self._take_list(line):
            self._begin(line)
        return False

    def _take_bar(self, line: Line) -> None:
        """A progress bar's, of which the writer may stand in the line before."""
        before, text = self._writer, line.text
        self._writer = f"rank {line.rank}" if line.rank >= 0 else ""
        if label := WRITER.match(text):
            self._writer, text = label["who"], text[label.end() :]
        elif gpu := _GPU.match(text):
            self._writer = f"GPU {gpu[1]}"
        writer = self._writer or before
        bar = _BAR.search(text) if writer and "%" in text else None
        if bar and len(self._bars) < MOST_KEPT:
            of = bar["title"] or "in use", bar["total"] or "100", writer
            self._bars[of] = int(bar["done"] or bar["use"]), line

    def _take_gpu(self, line: Line) -> None:
        text = line.text
        if process := _GPU_PROCESS.match(text):
            self._gpu_pids[int(process["gpu"])] = int(process["pid"])
        elif _GPU_HEAD.match(text):
            self._gpu_head = re.split(r", *| +", text.strip("# "))
        elif self._gpu_head and not text.startswith("#"):
            if not _GPU_ROW.match(text):
                self._gpu_head = []
                return
            cells = re.split(r", *| {2,}", text.strip())
            row = dict(zip(self._gpu_head, cells, strict=False))
            gpu = int(cells[0])
            if row.get("pid", "").isdecimal():
                self._gpu_pids[gpu] = int(row["pid"])
            use = row.get("sm") or row.get("utilization.gpu") or ""
            told = re.match(r"-$|\d{1,3}\b", use)
            if told:
                uses, _ = self._uses.setdefault(gpu, ([], line))
                uses.append(int(told[0].strip("-") or 0))

    def _end_gpus(self) -> None:
        """The one that idles, of all that are busy, is told beside the verdict."""
        idle = [gpu for gpu, (uses, _) in self._uses.items() if max(uses) <= _IDLE]
        busy = [gpu for gpu, (uses, _) in self._uses.items() if min(uses) >= _BUSY]
        if len(idle) != 1 or len(busy) < 2 or len(busy) + 1 < len(self._uses):
            return
        [gpu] = idle
        uses, line = self._uses[gpu]
        looks = f" at {len(uses)} looks" if len(uses) > 1 else ""
        text = f"idles{looks}, and all others are busy"
        rank = self._found.ranks_of_pids().get(self._gpu_pids.get(gpu, 0), NOT_TOLD)
        if rank != NOT_TOLD:
            self._found.idle[rank] = f"its GPU {text} [{line.cite}]"
        else:
            told = Condition(HINT, f"GPU {gpu} {text}")
            self._found.add(NOT_TOLD, told, line, own=False)

    def _end_bars(self) -> None:
        """The one that is not at its end, of several, is told beside the verdict."""
        for (title, total), bars in parties(
            (bar[:2], bar) for bar in self._bars
        ).items():
            behind = [bar for bar in bars if self._bars[bar][0] < int(total)]
            if len(bars) >= _LEAST_RANKS and len(behind) == 1:
                done, line = self._bars[behind[0]]
                text = f"{behind[0][2]} is at {done} ({shown(title)}), all others at {total}"
                self._found.add(NOT_TOLD, Condition(HINT, text), line, own=False)

    def _end_cells(self) -> None:
        """One value apart from all others, which are equal, is told beside the verdict."""
        cells, self._cells = self._cells, {}
        if len(cells) < _LEAST_RANKS:
            return
        by_value = parties((value, rank) for rank, value in cells.items())
        if len(by_value) != 2 or self._head is None:
            return
        (odd, ranks), (usual, _) = by_value.items()
        if len(ranks) == 1 and self._head.number - self._unlike_at < _NEAR:
            text = f"{shown(self._head.text)} {odd} on rank {ranks[0]}, {usual} on all others"
            self._found.add(NOT_TOLD, Condition(HINT, text), self._head, own=False)

    def _begin(self, line: Line) -> None:
        for split in _SPLITS:
            names = re.split(split, _message(line))
            roles = set(map(_role_of, names))
            if roles & _OF_RANK and roles & (_OF_HANGS | _OF_SLOWNESS):
                self._table = _Table(names, split, self.is_of_a_hang(line))
                return

    def is_of_a_hang(self, line: Line) -> bool:
        """Whether a line near before it speaks of one, or it does."""
        return line.number - self._hang_at < _NEAR

    def _take_row(self, line: Line) -> bool:
        table, text = self._table, _message(line)
        most = len(table.names) - 1
        cells = re.split(table.split, text, maxsplit=most)
        if len(cells) <= most:
            cells = text.split(maxsplit=most)
        if len(cells) <= most:
            return False
        row = dict(zip(table.names, cells, strict=True))
        rank = self._rank_of(row)
        if rank == NOT_TOLD:
            by_role = {_role_of(name): cell for name, cell in row.items()}
            self._note_unranked(by_role.get("pid", ""), by_role.get("state", ""), line)
        if rank not in table.rows:  # workers have their rank's command
            table.add(rank, row, line)
        return rank != NOT_TOLD

    def _rank_of(self, row: dict[str, str]) -> int:
        """By the first of its columns that tells it."""
        by_role = {_role_of(name): cell for name, cell in reversed(row.items())}
        for role in ("rank", "number"):
            if told := _NUMBER.fullmatch(by_role.get(role, "")):
                return int(told[1])
        command, pid = by_role.get("command", ""), by_role.get("pid", "")[:9]
        for pattern in (RANK_OF_COMMAND, LOCAL_RANK_OF_COMMAND):
            if found := pattern.search(command):
                rank = int(found[1])
                if pid.isdecimal() and len(self._found.listed) < MOST_KEPT:
                    self._found.listed[int(pid)] = rank
                if pid.isdecimal() and pattern is RANK_OF_COMMAND:
                    self._found.note_pid(int(pid), rank)
                return rank
        if not pid.isdecimal():
            return NOT_TOLD
        listed = self._found.listed.get(int(pid), NOT_TOLD)
        return self._found.rank_of_pid.get(int(pid), listed)

    def _take_process(self, line: Line) -> bool:
        """Of each the last look; a process's threads follow it."""
        told = _STATUS.match(line.text) or _PROCESS.match(line.text)
        if told is None:
            return False
        row = told.groupdict("")
        self._state, row["state"] = row["state"], row["state"] or self._state
        rank, command = self._rank_of(row), row.get("command", "")
        if rank == NOT_TOLD and "<defunct>" in command:
            self._defunct = [*self._defunct[:1], line]
        if rank == NOT_TOLD:
            self._note_unranked(row["pid"], row["state"], line)
        if rank == NOT_TOLD or not row["state"] or not row["pid"]:
            return not command
        before, self._process = self._process, (row["pid"], line.number)
        known = self._processes.rows.get(rank, row)
        if known["pid"] == row["pid"] and before != (row["pid"], line.number - 1):
            self._processes.add(rank, row, line)
            self._processes.is_of_a_hang |= self.is_of_a_hang(line)
        return True

    def _note_unranked(self, pid: str, state: str, line: Line) -> None:
        """Other lines may tell its rank."""
        if pid.isdecimal() and state and len(self._unranked) < MOST_KEPT:
            self._unranked[int(pid[:9])] = state, line

    def take_stopped(self, found: re.Match[str], line: Line) -> None:
        if found["next"]:
            self._traced = int(found["next"])
        elif len(self._stopped) < MOST_KEPT:
            self._stopped.setdefault(int(found["pid"] or self._traced), line)

    def _end_unranked(self) -> None:
        ranks, table = self._found.ranks_of_pids(), _Table(["state"])
        for pid, (state, line) in self._unranked.items():
            if (rank := ranks.get(pid, NOT_TOLD)) != NOT_TOLD:
                table.rows[rank] = {"state": state}
                table.lines[rank] = line._replace(text=" ".join(line.text.split()))
        self._judge(table)
        for pid, line in self._stopped.items():
            if (rank := ranks.get(pid, NOT_TOLD)) != NOT_TOLD:
                self._tell([rank], STOPPED, line, "")

    def _take_keyed(self, line: Line) -> bool:
        rank = _KEYED_RANK.findall(line.text)
        row = {}
        roles = _OF_HANGS
        if _OF_SLOW_RANKS.search(line.text):
            roles = roles | _OF_SLOWNESS | {"part"}
        for one in _KEYED.finditer(line.text) if len(rank) == 1 else ():
            if _role_of(name := one["key"] or one["state"]) in roles:
                row[name] = one["value"] or one["word"]
        # Each rank's own lines have its label, and no heartbeats.
        if not row or (line.has_prefix and "age" not in map(_role_of, row)):
            return False
        table = self._table
        if table.split or row.keys() != set(table.names) or int(rank[0]) in table.rows:
            self.end()
            self._table = _Table([*row], is_of_a_hang=self.is_of_a_hang(line))
        self._table.add(int(rank[0]), row, line)
        return True

    def _take_list(self, line: Line) -> bool:
        cells = _LISTED.findall(line.text)
        if len(cells) < _LEAST_RANKS:
            return False
        words = re.findall("[A-Za-z]+", line.text.partition(cells[0][1])[0])
        names = [*map("_".join, pairwise(words)), *words]
        name = next((one for one in names if _role_of(one) in _NUMBERS), "")
        self._table = _Table([name], is_of_a_hang=self.is_of_a_hang(line))
        for rank, cell in cells if name else ():
            self._table.add(int(rank), {name: cell}, line)
        return True

    def finish(self) -> None:
        self.end_file()
        self._end_unranked()
        self._end_bars()
        self._end_gpus()
        rank = self._found.unlisted
        if len(self._defunct) != 1 or rank == NOT_TOLD:
            return
        [line] = self._defunct
        # A rank's child is its worker.
        if set(line.text.split()).isdisjoint(map(str, self._found.listed)):
            text = f"{line.text.strip()} (of the other processes none is rank {rank})"
            self._tell([rank], TOLD_DEAD, line._replace(text=text), "")

    def end_file(self) -> None:
        self.end()
        table, self._processes = self._processes, _Table(["state"])
        self._judge(table)

    def end(self) -> None:
        """Judge the table that was read."""
        self._end_cells()
        table, self._table = self._table, _Table()
        self._judge(table)

    def _judge(self, table: _Table) -> None:
        if len(table.rows) < 2 or not _are_ranks(table.rows.keys()):
            return
        told = [*self._by_state(table)]
        for rank, text, is_close in _outliers(table, "step", "age"):
            told.append((rank, TOLD_APART, A_HANG if is_close else "", text))
        for rank in table.rows.keys() - {one[0] for one in told}:
            self._is_there(rank)
        for rank, kind, needs, text in told:
            line = table.lines[rank]
            needs = "" if table.is_of_a_hang else needs
            self._tell([rank], kind, line._replace(text=text or line.text), needs)
        self._take_slow(table)

    def _by_state(self, table: _Table) -> Iterator[_Apart]:
        for cells in table.columns("state").values():
            kinds = {rank: self._state_of(cell) for rank, cell in cells.items()}
            others = {cell for rank, cell in cells.items() if not kinds[rank]}
            for rank, kind in kinds.items() if len(others) == 1 else ():
                if kind:
                    yield rank, kind, "", ""
            states = {rank: _group(_STATES, cell) for rank, cell in cells.items()}
            odd = [rank for rank, state in states.items() if state != "runs"]
            if len(odd) != 1:
                continue
            [rank] = odd
            if state := states[rank]:
                kind = {"ended": TOLD_DEAD, "stopped": STOPPED}.get(state, TOLD_APART)
                is_known = state != "asleep" or _FILE_SYSTEMS.search(
                    table.lines[rank].text
                )
                yield rank, kind, "" if is_known else A_HANG, ""

    def _take_slow(self, table: _Table) -> None:
        roles = _OF_SLOWNESS | ({"part"} if table.columns("phase") else set())
        slow = {rank: text for rank, text, _ in _outliers(table, *roles)}
        if table.columns(*roles):
            self._slow = None  # the last table counts
        if len(slow) == 1:
            [(rank, text)] = slow.items()
            self._note_slow(rank, text, table.lines[rank])


def _are_ranks(numbers: Collection[int]) -> bool:
    """Not of models (4, 8, 16), nor of a list of the best (1, 2, 3)."""
    first = min(numbers)
    return first == 0 or (first > 1 and max(numbers) - first < len(numbers))


def _outliers(table: _Table, *roles: str) -> Iterator[tuple[int, str, bool]]:
    """Of each column the one rank that is apart from the others, which are alike, in words, and
    whether it is close: one step.
    """
    for name, cells in table.columns(*roles).items():
        role, values = _role_of(name), _values(cells)
        if len(values) < _LEAST_RANKS:
            continue
        is_of_most = role not in ("step", "wait", "rate")
        one, *others = sorted(values, key=values.__getitem__, reverse=is_of_most)
        value, near, far = (values[rank] for rank in (one, others[0], others[-1]))
        is_alike = max(near, far) <= _MOST_UNLIKE * min(near, far)
        is_near = _LEAST_SHARE * near <= value <= near / _LEAST_SHARE
        is_apart = is_alike and not is_near
        if role == "step":
            is_apart = value < near == far
        elif role == "age":
            is_apart = value > max(_LEAST_AGE_S, _LEAST_AGE * near)
        if is_apart:
            between = " to ".join(dict.fromkeys((cells[others[-1]], cells[others[0]])))
            text = f"{name} {cells[one]}, and the others {between}"
            yield one, text, role == "step" and value + 1 == near


def _values(cells: Mapping[int, str]) -> dict[int, float]:
    """None where a cell has no number. Of times of the day, how long ago by the last of them."""
    values = {}
    for rank, cell in cells.items():
        if (told := _VALUE.fullmatch(cell)) is None:
            return {}
        clock = [float(told[part] or 0) for part in ("hours", "minutes", "seconds")]
        values[rank] = -3600 * clock[0] - 60 * clock[1] - clock[2]
        if told["number"]:
            values[rank] = float(told["number"]) * _UNITS.get(
                (told["unit"] or "")[:2], 1.0
            )
    last = min(*values.values(), 0.0)
    return {rank: value - last for rank, value in values.items()}


@lru_cache(1 << 9)
def _looks_of(shape: str) -> tuple[bool, bool, bool]:
    """Of lines that differ in digits alone: whether they speak of a hang, may be a row that names
    what it has, may begin a table.
    """
    of_ranks = "ank" in shape
    keys = (one["key"] or "state" for one in _KEYED.finditer(shape))
    may_be_row = of_ranks and any(map(_role_of, keys))
    is_list = of_ranks and len(_LISTED.findall(shape)) >= _LEAST_RANKS
    may_begin = is_list or _MAY_BE_HEAD.search(shape) is not None
    return _OF_A_HANG.search(shape.lower()) is not None, may_be_row, may_begin


@lru_cache(1 << 12)  # a log has ever new words
def _role_of(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return _group(_ROLES, words)


def _group(pattern: re.Pattern[str], text: str) -> str:
    """The group of the pattern that is all of the text."""
    found = pattern.fullmatch(text)
    return (found and found.lastgroup) or ""


def _message(line: Line) -> str:
    before = BEFORE_MESSAGE.match(line.text)
    return line.text[before.end() if before else 0 :].strip(" \t|│")
