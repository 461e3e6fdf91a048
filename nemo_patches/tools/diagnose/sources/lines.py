"""A log's lines, put together again where a terminal has wrapped them, and without prefixes.

Launchers, containers and people put them there; many tell the rank.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD

MOST_KEPT = 4096  # ranks, and the like, of one launch
ANY_DIGIT = str.maketrans("123456789", "000000000")
RANK_LIST = r"\d{1,6}(?:(?:, ?|-)\d{1,6}){0,400}"  # a pattern; ranks_in() reads it
DEFAULT_GROUPS = ("", "0")  # "": a group that the log does not name
_LONGEST_LINE = 1 << 14  # characters that are looked at
_LONGEST_TEXT = 300
_MOST_JOINED = 16  # lines that a terminal may have made of one
_RANK = re.compile(r"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{0,80})?Rank (\d{1,7})\]")
_GROUP = re.compile(
    r"\[PG ?(?:ID ?)?(\w{1,40})(?: ?PG ?GUID ?(\w{1,40}))?(?:\((\w{1,40})\))?"
)
# Before each line of a container's log: "2026-01-02T03:04:05.6Z stderr F "
_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?"
)
_LONGEST_JSON = 1 << 20  # characters of a line
# Of JSON, as Docker and structured loggers write it: what has a line, or several.
TEXTS = re.compile(
    "log|line|msg|message|event|error|exception|exc_info|exc_text|stack|traceback|py_callstack|body|"
    "textPayload"
)
_OF_RANK = re.compile("(?:global_?|world_?|process_?|dist_?)?rank", re.IGNORECASE)
# A line of keys and values: "level=error rank=2 msg="..""
_KEYS_AND_VALUES = re.compile(
    r'\w[\w.]{0,40}=(?:"(?:[^"\\]|\\.){0,9999}"|\S{1,400})(?:\s+|$)'
)
_MOST_PREFIXES = 4  # before one line
_MOST_LOOKED_AT = 20_000  # lines, for a label
# May stand before what has the rank, or has the rank itself.
_PREFIXES = tuple(
    map(
        re.compile,
        (
            # A logger's time, and what follows is a rank's
            r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]? "
            r"(?=\[(?:rank\d|default\d|\d{1,9},)|\(\w{1,80} pid=)",
            r"[\w.-]{1,80}/\d{1,6} (?=\[default\d)",  # NeMo-Run
            r"\[\d{1,7}\] (?=\[rank\d)",
            # What people write: "[time] [rank=3] ", "(worker2, rank=2, ip=..) "
            r"(?!.{0,120}(?:Aborting process|\[name=))(?:\[[^\[\]]{1,60}\] ?){0,2}"
            r"[\[(][^\[\]()]{0,60}?\b[Rr]ank= ?(?P<rank>\d{1,6})\b[^\[\]()]{0,80}[\])]"
            r":? ?(?!pid=)(?:\|{1,2} )?",
            # "[time][rank2][ERROR] ", "[rank 2]: ", and not torch's own "[rank2]:"
            r"(?:\[[\w :.,/-]{1,60}\] ?){0,2}"
            r"\[rank(?P<apart>[ _-])?(?P<rank>\d{1,6})\](?(apart):?|(?!:))"
            r"(?: ?\[[A-Z]{4,8}\])? ?",
            # "0: time host [rank 0 pid 4711] ", of which another reader wants the process
            r"(?=(?: {0,5}\d{1,6}: )?(?:[\d:T.,Z+/-]{5,32} ){0,2}(?:[\w.-]{1,60} )?"
            r"\[[Rr]ank[ =:]{1,3}(?P<rank>\d{1,6})(?:/\d{1,6})?[ ,|]{1,3}pid[ =:]{1,2}\d{1,9}\])",
            # HCCL
            r"\[(?:ERROR|WARNING|INFO)\] [\d:-]{10,24} \(PID:\d{1,9}, Device:\d{1,4},"
            r" RankID:(?P<rank>\d{1,7})\) ?",
            # vLLM
            r"\((?:\w{1,40}_)?(?:TP|DP|PP)(?P<rank>\d{1,6}) pid=\d{1,9}\) "
            r"(?:(?:ERROR|WARNING|INFO) [\d-]{5} [\d:]{8} \[[^\]]{1,80}\] )?",
        ),
    )
)
_LABEL = re.compile(
    r"(?P<before>[\[(<{|#*]{0,3}\s?(?:[^\W\d_][\w./-]{0,60}?)?[ =:#_-]{0,2})(?P<number>\d{1,5})"
    r"(?P<after>(?:/[\w-]{1,40})?(?:\s{0,4}[\])|:>}]{1,3}){1,2}(?:\s|$)|\s+)"
)
# A logger's, before a label, and behind it
_CLOCK = r"(?:\[?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\]?\s{1,2}(?:[|-] )?)?"
_BEHIND_CLOCK = re.compile(_CLOCK)
_LEVEL = r"(?:\[?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\]?[:|]?(?: |$))?"
# What a logger writes before a message: its time, the level, who writes
BEFORE_MESSAGE = re.compile(
    rf"(?:[A-Z][a-z]{{2}} {{1,2}}\d{{1,2}} )?{_CLOCK}{_LEVEL}"
    r"(?:(?![Rr][Aa][Nn][Kk])[A-Za-z][\w ./-]{0,40}(?:\[\d{1,9}\])?: |\[[A-Za-z][\w .-]{0,40}\] )?"
)
# A rank in a command, or in its environment
RANK_OF_COMMAND, LOCAL_RANK_OF_COMMAND = (
    re.compile(rf"(?<![\w-])(?:{words})[= ]['\"]?(\d{{1,6}})\b")
    for words in (
        "--(?:global[-_]|ddp[-_.]|dist(?:ributed)?[-_.])?rank|RANK|SLURM_PROCID|OMPI_COMM_WORLD_RANK|PMI_RANK",
        "--local[-_]rank|(?:OMPI_COMM_WORLD_)?LOCAL_RANK|SLURM_LOCALID",
    )
)
# What Ray writes before a process's lines, and its rank once
WRITER = re.compile(
    r"\((?P<who>\w[\w.:-]{0,80} pid=(?P<pid>\d{1,9})(?:, ip=[\d.]{7,15})?)\)(?: |$)"
)
_OF_RANKS = re.compile(
    r"(?<![A-Za-z])(?:global_?|world_?|mpi_?|dist_?)?rank|worker|proc|task|replica|trainer|learner|进程",
    re.IGNORECASE,
)
# Labels that take numbers and are of time, of data, or of more than one rank.
_OF_OTHERS = re.compile(
    r"(?i)epoch|step|iter|batch|layer|stage|bucket|shard|file|trial|fold|line|attempt|block|"
    r"stream|node|host|local|loader|version|chunk|group|page|part|thread|frame|sample|utt|phase|"
    r"count|level|round|call|seq|size|run_?$|job|day|v$|t$|^\W*$(?<!\[)(?<!<)(?<!\()"
)
_SIZE = re.compile(
    rb"Starting with (\d{1,7}) processes|world_?[ -]?size\W{1,3}(\d{1,7})\b|\[rank(\d{1,7})\]"
)
# The rank that a line's own words tell
_OWN = re.compile(
    r"(?<![A-Za-z_-])(?<!ocal )(?<!ode )(?<!for )(?<!rom )(?<!ing )"
    r"(?:(?:GLOBAL_|SLURM_)?(?:RANK|PROCID)[ =:]{1,3}|(?:global_|world_)?[Rr]ank {0,8}[=:] ?|"
    r"(?:(?:as|am|is|got|launched|started|joined|initiali[sz]ed) )(?:global )?rank |\[rank)"
    r"(\d{1,6})\b(?!\.\d)"
)
# A pod's or a host's name: before the line, or behind such a word
_NAME = r"[a-z](?=[a-z.-]*\d|[a-z]*-)[a-z0-9]*(?:[-.][a-z0-9]+){0,20}"
_NAMED = re.compile(
    rf"^{_CLOCK}\W{{0,2}}(?:pod/)?(?P<label>{_NAME})(?:/[\w.-]{{1,60}}){{0,2}}\s{{0,8}}[\]|:]{{1,2}}\s+|"
    r"\b(?i:host(?:_?name)?|node(?:_?name)?|pod(?:_?name)?|on|at)[ =:]{1,2}(?:(?:node|host|pod) )?"
    rf"['\"]?(?P<name>{_NAME})|\((?P<inside>{_NAME})[,)]"
)
# Above the lines of one rank: "---- Begin global rank 5 STDERR ----", "==> rank_5.log <=="; another
# heading ends them.
_SECTION = re.compile(
    r"(?:[=#*-]{2,}>? ?(?:(?i:begin (?:of )?)?(?:[\w.-]{1,80}/)*(?i:global[ _]|worker )?)"
    r"[Rr]ank[ _:#=-]{0,2}(?P<rank>\d{1,6})(?:[ .](?:STDOUT|STDERR|log|out|err|stdout|stderr)){0,2}"
    r" ?<?[=#*-]{2,}$)|[=#*-]{3,} ?\S.{0,200}[=#*-]{2,}$|==> \S+ <==$"
)
# What launchers write before each line: torchrun --tee the local rank, mpirun --tag-output,
# horovodrun and srun -l the job's.
_TEE = re.compile(
    r"\[default(\d{1,6})\]: ?|"
    r"(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})?"
    r"\[(?:\d{1,9},(?:mpirank:)?)?(\d{1,6})(?:,[\w-]{1,80})?\]<std(?:err|out)>: ?"
)
_SRUN_LABEL = re.compile(r" {0,5}(\d{1,6}): ")
# From such a line on.
_LABELLED = re.compile(r" {0,5}\d{1,6}: (?:Traceback \(most recent|\[rank\d)")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NEW_MESSAGE = re.compile(
    r"^\W{0,3}(?:\d+: )?\[(?:rank\d|default\d|E |E\d|W |W\d|I |I\d|F"
    r" )|\[rank\d{1,7}\]:|"
    r"ProcessGroupNCCL\.cpp:\d{1,6}\]|NCCL INFO"
    r"|^\((?:\w[\w.:-]{0,80} pid=\d|raylet\b)"
    r"|^(?:slurmstepd[\w.-]{0,80}|srun|prterun|mpirun): |^[EWIF]\d{4} \d\d:|^\d{4}-\d\d-\d\d["
    r" T]\d\d:"
    r"|^(?:frame #\d|Traceback |Fatal Python|Error executing|Exception"
    r" raised)|nemo_patches (?:INFO|WARNING|ERROR) \["
)
_CPP_FRAME = re.compile(r"frame #\d{1,4}: ")
_RULES = ("==", "##", "**", "--")
_SEVERAL = re.compile(
    r"(?=\[rank\d{1,7}\]:\[[EFWI])|(?<=[^:])(?=\[[EFWI] ProcessGroupNCCL)"
)  # processes' in a line
_FRAMED = re.compile(r"│ ?(.*?)\s*│$")  # a pane of a terminal
_QUOTED = re.compile(r"^(?:> ?){1,8}")
# A message that a terminal may have wrapped
_BEGINS = re.compile(
    r"ProcessGroupNCCL|Watchdog caught|last enqueued|gloo/|failed \(exitcode|Detected mismatch|"
    r"watchdog thread|store based barrier|client socket has timed|is setting up NC|"
    r"sigkill_handler\] \[|with PID|\[Rank$|multiprocessing/api\.py:\d{1,5}\] |error: \*\*\* |"
    r"DistStoreError: Timed|DistBackendError: \[\d|DDP expects same model"
)
_WHOLE = re.compile(
    r"timing out$|ng out\.$|before timing out|timed out in blocking wait|with code -?\d+\.|"
    r"last ?completed ?(?:NCCL ?)?work: ?-?\d|"
    r"running ?collective:.{1,2000}running ?collective: ?CollectiveFingerPrint\([^)]{0,300}"
    r"(?:\)|TensorDtypes)|"
    r"inconsistent \d{1,9} params|keys: ?/\S{1,200}/\w{0,20}\d$|"
    r"waiting for key: ?\S{1,200} after|Socket Timeout"
)


class Line(NamedTuple):
    """rank: from the line's prefix if has_prefix; else torchrun's local rank, from its prefix or
    the file's folder, which is the job's rank on a single host. number: in its file, from 1.
    """

    text: str
    file: str = ""
    number: int = 0
    rank: int = NOT_TOLD
    has_prefix: bool = False

    @property
    def cite(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def local_rank(self) -> int:
        return NOT_TOLD if self.has_prefix else self.rank


class Prefixed(NamedTuple):
    """A line without what stands before it. rank: the job's, None where no prefix tells it. local:
    of a launcher's label, or of the file.
    """

    text: str
    rank: int | None
    local: int


class Prefixes:
    """Of one file. head: its first bytes, by which a label is learned. local: the rank in the
    file's name or folder, or NOT_TOLD.
    """

    def __init__(self, head: bytes, local: int) -> None:
        # Of pods and hosts, their ranks; of what stands before lines, its one.
        self.names: dict[str, set[int]] = defaultdict(set)
        self._labels: dict[str, int] = {}
        self._label = self._learned(head)
        self._local = local
        self._launchers = _TEE
        self._section = NOT_TOLD

    def strip(self, text: str) -> Prefixed:
        if _LABELLED.match(text):
            self._launchers = _SRUN_LABEL
        if text[:2] in _RULES and (found := _SECTION.match(text)):
            self._section = int(found["rank"] or NOT_TOLD)
        told, local = NOT_TOLD, self._local
        for _ in range(_MOST_PREFIXES):
            found = next((one for p in _PREFIXES if (one := p.match(text))), None)
            if found is None:
                break
            told = int(found.groupdict().get("rank") or told)
            text = text[found.end() :]
        if self._label is not None and (found := self._label.match(text)):
            text = text[found.end() :]
            told = int(found["number"]) if told < 0 else told
        elif told < 0 and self._labels and (found := _NAMED.match(text)):
            told = self._labels.get(found["label"], NOT_TOLD)
            text = text[found.end() :] if told >= 0 else text
        rank = rank_in(text)
        if label := self._launchers.match(text):
            local = int(label[label.lastindex or 1])
            text = text[label.end() :]
        elif rank is None and max(told, self._section) >= 0:
            rank = told if told >= 0 else self._section
        return Prefixed(text, rank, local)

    def _learned(self, head: bytes) -> re.Pattern[str] | None:
        """The label that begins lines and takes the numbers of ranks."""
        numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
        agree: dict[tuple[str, str], int] = defaultdict(int)
        lines = head.split(b"\n", _MOST_LOOKED_AT)[:_MOST_LOOKED_AT]
        for raw in lines:
            text = said(raw[:2000].decode("utf-8", "replace").rstrip("\r"))
            self._note_names(text)
            clock = _BEHIND_CLOCK.match(text)
            text = text[clock.end() :] if clock else text
            if (found := _LABEL.match(text)) is None:
                continue
            rest, number = text[found.end() :], int(found["number"])
            key = found["before"], found["after"].strip()
            numbers[key].append(number)
            if own := _OWN.search(rest):
                agree[key] += 1 if int(own[1]) == number else -1
        self._keep_labels()
        sizes = [0]
        for processes, world, rank in _SIZE.findall(head):
            sizes += [int(processes or world or 0), int(rank) + 1 if rank else 0]
        size = max(sizes)
        known = [
            (len(seen), before, after)
            for (before, after), seen in numbers.items()
            if agree[before, after] >= 0 and _is_of_ranks(before, after, seen, size)
        ]
        if not known:
            return None
        _, before, after = max(known)
        end = rf"\s{{0,4}}{re.escape(after)}(?:\s{{1,2}}|$)" if after else r"(?:\s|$)"
        label = rf"{re.escape(before)}(?P<number>\d{{1,5}}){end}"
        return re.compile(_CLOCK + label + _LEVEL)

    def _note_names(self, text: str) -> None:
        if "ank" not in text and "RANK" not in text:
            return
        ranks = set(map(int, _OWN.findall(text)))
        # NCCL's may be a group's.
        if len(ranks) != 1 or len(self.names) >= MOST_KEPT or "NCCL INFO" in text:
            return
        for found in _NAMED.finditer(text):
            name = found[found.lastgroup or 0]
            self.names[name] |= ranks
            if found["label"]:
                self._labels[name] = min(ranks)

    def _keep_labels(self) -> None:
        """Those before lines of one rank, if each is another's."""
        labels = {
            name: rank
            for name, rank in self._labels.items()
            if len(self.names[name]) == 1
        }
        is_each = 1 < len(labels) == len(set(labels.values()))
        self._labels = labels if is_each else {}


def said(line: str) -> str:
    """The line without its stamp.

    Of JSON, or of keys and values, the lines that it has in it, with the rank.
    """
    if stamp := _STAMP.match(line):
        line = line[stamp.end() :]
    if not line.startswith("{") or len(line) > _LONGEST_JSON:
        return _said_by_keys(line) if "rank=" in line and "=" in line[:40] else line
    try:
        told = json.loads(line)
        lines = "\n".join(_texts_in(told)) or line
    except (ValueError, RecursionError):
        return line
    return _of_rank(_rank_among(told), lines)


def _said_by_keys(line: str) -> str:
    told, end = {}, 0
    while pair := _KEYS_AND_VALUES.match(line, end):
        key, _, value = pair[0].strip().partition("=")
        told[key] = value.strip('"').replace(r"\n", "\n").replace(r"\"", '"')
        end = pair.end()
    rank = _rank_among(told)
    if end < len(line) or rank is None or len(told) < 3:
        return line
    return _of_rank(rank, "\n".join(_texts_in(told)) or line)


def _of_rank(rank: int | None, lines: str) -> str:
    if rank is None:
        return lines
    return "\n".join(f"[rank{rank}]: {each}" for each in lines.split("\n"))


def _rank_among(told: Mapping[str, object]) -> int | None:
    """Of a logger's fields, also those in "extra", "labels" or the like."""
    for name, value in told.items():
        if _OF_RANK.fullmatch(name) and re.fullmatch(r"\d{1,6}", str(value)):
            return int(str(value))
    inner = (one for one in told.values() if isinstance(one, dict))
    return next((r for one in inner if (r := _rank_among(one)) is not None), None)


def _texts_in(told: Mapping[str, object]) -> Iterator[str]:
    for name, value in told.items():
        if isinstance(value, dict):
            yield from _texts_in(value)
        elif isinstance(value, str) and TEXTS.fullmatch(name):
            yield value.rstrip("\n")


def shown(text: str) -> str:
    """A piece of a log, fit for printing."""
    return safe(text.strip())[:_LONGEST_TEXT]


def pieces(line: bytes) -> Iterator[str]:
    """Split what progress bars, or processes that write at once, have put into one line."""
    text = said(line.decode("utf-8", "replace").rstrip("\r"))
    for part in text.replace("\r", "\n").split("\n"):
        text = _COLOURS.sub("", part[: 4 * _LONGEST_LINE])[:_LONGEST_LINE].rstrip()
        text = _QUOTED.sub("", text)
        if framed := _FRAMED.match(text):
            text = framed[1]
        if text.count("ProcessGroupNCCL") > 1:
            yield from _SEVERAL.split(text)
        else:
            yield text


def messages(
    lines: Iterable[tuple[int, str]], is_whole: Callable[[str], bool]
) -> Iterator[tuple[int, str]]:
    """The lines, with those that a terminal has wrapped put together again. is_whole: whether a
    line of the table's goes on in the next one.
    """
    begun, parts, begun_at, before = "", 0, 0, 0
    for number, line in lines:
        is_next = line and number <= before + 1 and not _NEW_MESSAGE.search(line)
        before = number
        # srun -l has put its label before both: they were two lines.
        has_label = _has_label_of(begun, line)
        if begun and parts < _MOST_JOINED and is_next and not has_label:
            begun += line.lstrip() if begun.endswith(" ") else line
            parts += 1
        else:
            if begun:
                yield begun_at, begun
            begun, begun_at, parts = line, number, 0
        if not goes_on(begun, is_whole):
            yield begun_at, begun
            begun = ""
        elif begun.endswith(("[Rank", ":", ",", "by")):
            begun += " "
    if begun:
        yield begun_at, begun


def _has_label_of(begun: str, line: str) -> bool:
    label = _SRUN_LABEL.match(begun)
    return label is not None and line.startswith(label[0])


def goes_on(text: str, is_whole: Callable[[str], bool]) -> bool:
    """Whether a message of torch or a launcher has begun, and not come to its end."""
    if not _BEGINS.search(text) or _CPP_FRAME.search(text):
        return False
    return not _WHOLE.search(text) and not is_whole(text)


def rank_in(text: str) -> int | None:
    """The job's rank, by a line's prefix; None for [PG 3 Rank 1] alone, which has the group's."""
    if (prefix := _RANK.search(text)) is None:
        return None
    if prefix[1]:
        return int(prefix[1])
    return (
        int(prefix[2])
        if group_of(prefix[0]) in DEFAULT_GROUPS or "PG ID" not in prefix[0]
        else None
    )


def group_of(text: str) -> str:
    group = _GROUP.search(text)
    if group is None:
        return ""
    number = safe(group[2] or group[1])
    is_named = group[3] and number not in DEFAULT_GROUPS
    return f"{number} ({safe(group[3])})" if is_named else number


def ranks_in(text: str) -> list[int]:
    """ "0, 2-4": [0, 2, 3, 4], as "0 2 3 4"; at most MOST_KEPT."""
    ranks: list[int] = []
    if "," in text:  # a line's end may be within a number
        text = text.replace(" ", "")
    for first, last in re.findall(r"(\d{1,7})(?: ?- ?(\d{1,7}))?", text):
        begin = int(first)
        ranks += range(begin, min(int(last or first), begin + MOST_KEPT) + 1)
    return ranks[:MOST_KEPT]


def _is_of_ranks(before: str, after: str, seen: Sequence[int], size: int) -> bool:
    """size: of the job, as far as lines tell; 0: not known."""
    ranks = set(seen)
    count = max(ranks) + 1
    if len(ranks) < 2 or not before + after:
        return False
    is_named = _OF_RANKS.search(before) is not None
    if is_named and (after or "=" in before):
        return size == 0 or count <= size
    if is_named and before[-1:].isalpha() and size in (0, count):  # "rank3 "
        return len(seen) >= 2 * count and _turns_back(seen) > 0
    if _OF_OTHERS.search(before) or not after:
        return False
    return (
        ranks == set(range(count))
        and len(seen) >= 2 * count
        and _turns_back(seen) >= 2
        and size in (0, count)
    )


def _turns_back(seen: Sequence[int]) -> int:
    """How often a smaller number follows: ranks' lines mix, an epoch's rise."""
    return sum(second < first for first, second in pairwise(seen))
