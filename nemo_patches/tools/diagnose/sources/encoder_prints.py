"""People's own prints around a call of the encoder or a collective, and where their batches end.

They are guesses, and accuse nobody.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nemo_patches.judging.kinds import OF_TRAINING
from nemo_patches.text import named
from nemo_patches.tools.diagnose.findings import NOT_ENOUGH, Finding
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps, ranks_named_in
from nemo_patches.tools.diagnose.sources.lines import (
    BEFORE_MESSAGE,
    MOST_KEPT,
    Line,
    shown,
)
from nemo_patches.tools.diagnose.verdicts import finding, parties

_RANK = re.compile(r"\b(?:global_?)?[Rr]ank[ =:_#-]{0,2}(\d{1,6})\b")
# A line of a rank's own: "rank 2: no data", "[rank 2/8] no data"; not "lora rank 8"
_OWN = re.compile(
    r"\W{0,3}(?:global_?)?[Rr]ank[ =:_#-]{0,2}(\d{1,6})(?:(?:/| of )\d{1,6})?\s?[:|\])]"
)
# "before validation, rank 2"; not "rank 8 on GPU 2"
_AT_THE_END = re.compile(
    r"(?!.*(?i:rank)\W{0,2}\d+\b.+\d$).*(?<!for )(?<!rom )(?<! to )(?<! of )(?<!ith )"
    r"\b(?i:rank|device|gpu|worker)[ =:#_-]{0,2}(\d{1,6})$"
)
_OF_TORCH = re.compile("rror|ProcessGroupNCCL|frame #")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
_CLOCK = re.compile(r"\b(\d\d):(\d\d):(\d\d)\b")
_SILENCE_S, _MOST_SILENCE_S = 60, 43_200
_CALLED = (
    r"about to (?:call|enter|run)|before|calling|entering|starting|enters?|"
    r"wait(?:ing|s)? (?:in|at|for|on)|reached|arrived (?:in|at)|"
    r"(?:going|goes) in(?:to)?|进入|即将调用|开始调用|等待"
)
_RETURNED = (
    r"after|completed|finished|done|returned|returns|left|exited|passed|完成|结束|返回"
)
_OF_CALL = r"(?P<of>encoder|all_?reduce|all_?gather|barrier)"
_BEFORE = re.compile(
    rf"(?i)\b(?:{_CALLED})\b\W{{1,3}}(?:\w+\W{{1,3}}){{0,3}}?(?:\w+[._])?{_OF_CALL}\b"
)
_AFTER = re.compile(
    rf"(?i)\b(?:{_RETURNED})\b\W{{1,3}}(?:\w+\W{{1,3}}){{0,3}}?(?:\w+[._])?{_OF_CALL}\b|"
    rf"\b{_OF_CALL.replace('of', 'in')}\b(?:\W{{1,3}}\w+){{0,3}}?\W{{1,3}}(?:{_RETURNED})\b"
)
_AFTER_ALONE = re.compile(
    rf"(?i)^\W{{0,3}}(?:step \d+\W{{1,3}})?(?:{_RETURNED})\W{{0,3}}$"
)
# Such a line measures, is of the encoder's weights, or tells what others do.
_OTHER = re.compile(
    r"(?i)\b(?:time|took|elapsed|mem(?:ory)?|shape|weights?|frozen?|freez\w+|param\w*|config|"
    r"pre-?train\w*|loading|(?:other|remaining) (?:rank|worker|process)\w*|others)\b"
)
_ENCODER = "the encoder"
# "no more batches", "left the training loop"
_RAN_OUT = re.compile(
    r"(?i)\bno (?:more|further) (?:training )?(?:batch(?:es)?|data|samples?)\b(?! (?:load|work))|"
    r"\b(?:ran |is |am )?out of (?:training )?(?:batches|data|samples)\b|"
    r"\b(?:data ?loader|iterator|data ?set|shards?) (?:is |was |has been )?exhausted\b|"
    r"\b(?:data(?: ?loader|set)?|iterator|shards?|batches) (?:has |have |is |are )?end(?:ed|s)?\b|"
    r"\bend of (?:(?:its|the|my|all) )?(?:data(?: ?loader|set)?|iterator|shards?|batches)\b|"
    r"\b(?:leaving|leaves|left|exit(?:s|ing|ed)) the (?:train(?:ing)? )?loop\b|"
    r"\btrain(?:ing)? loop (?:is |was )?(?:left|exited|over)\b|"
    r"\bkeine weiteren (?:batches|daten)|没有更多数据|没有更多批次|"
    r"没有更多batch|数据读完|数据已读完|数据耗尽|数据已耗尽|数据用完"
)
_IS_DONE = re.compile(r"(?i)\b(?:done|finish\w*|complet\w*|exit\w*|fertig)\b|完成|结束")
WORDS_OF_AN_END = (
    *("o more ", "o further ", "ut of ", "xhausted", " loop", "weiteren ", "oader end"),
    *(" ended", "end of "),
)
_TYPED = ("$ ", "# ", "+ ")  # how a command begins, which no rank printed
_MOST_LINES, _MOST_ALONE = 8, 3  # of a rank: its last, and of these that are shown
_MOST_AFTER = 4  # lines of a rank that has run out: where it waits
# One of these is in each line that begins such prints.
WORDS = ("ncoder", "reduce", "gather", "arrier")


@dataclass
class _Prints:
    """Those around one call."""

    name: str
    called: Counter[int] = field(default_factory=Counter)
    returned: Counter[int] = field(default_factory=Counter)
    last: dict[int, Line] = field(default_factory=dict)  # of ranks that called it
    names_calls: bool = False  # "about to call": no other words for a start

    def is_inside(self, rank: int) -> bool:
        return self.called[rank] > self.returned[rank]

    def finding(self, seen: Mapping[int, Line]) -> Finding | None:
        """None where all have come out, or where the prints may be of something else. seen: the
        last line of each rank, but for errors.
        """
        called, returned, last = self.called, self.returned, self.last
        inside = [rank for rank in last if self.is_inside(rank)]
        if not inside or len(last) < 2:
            return None
        if not returned.total():
            others = self._others(seen)
            if others is not None or not self.names_calls:
                return others
        most = max(called[rank] for rank in inside)
        first = min(called[rank] for rank in inside)
        came_out = [rank for rank in last if returned[rank] >= first]
        behind = [rank for rank in last if returned[rank] == called[rank] < most]
        if came_out:
            stuck = [rank for rank in inside if called[rank] == first]
            text = (
                f"{_who(stuck, last)} called {self.name} and did not come out of it, as"
                f" {_who(came_out, last)} did: stuck in it, or only slow, or the log was cut."
            )
        elif behind:
            text = (
                f"{_who(inside, last)} called {self.name}, and {_who(behind, last)} did not"
                " call it again: held up before it, by data or preprocessing, or only slow,"
                " or the log was cut."
            )
        else:
            text = (
                f"{_who(inside, last)}, all that print, called {self.name}, and none came"
                " out of it."
            )
        return _guess(text)

    def _others(self, seen: Mapping[int, Line]) -> Finding | None:
        """Where several have called it and said nothing after that, and who else prints, at most
        as many, has not, or less often. Of each host one rank alone may print that.
        """
        most = max(self.called.values())
        inside = [
            rank
            for rank, line in self.last.items()
            if self.called[rank] == most and seen.get(rank) is line
        ]
        behind = [rank for rank in seen if self.called[rank] < most]
        if len(inside) < 2 or not 0 < len(behind) <= len(inside):
            return None
        return _held_up(inside, behind, seen, f"called {self.name}")


def _held_up(
    there: Iterable[int], absent: Iterable[int], seen: Mapping[int, Line], did: str
) -> Finding:
    text = (
        f"{_who(there, seen)} {did}, and {_who(absent, seen)} did not say so: held up"
        " before it, gone, or only slow, or the log was cut."
    )
    return _guess(text)


def _who(ranks: Iterable[int], last: Mapping[int, Line]) -> str:
    """With the last print of the first."""
    return f"{named(ranks)} ({_quoted(last[min(ranks)])})"


def _quoted(line: Line) -> str:
    return f'"{shown(line.text)}" [{line.cite}]'


def _guess(text: str) -> Finding:
    return finding(NOT_ENOUGH, f"A guess, by the job's own prints: {text}")


class EncoderPrints:
    """One launch's lines."""

    def __init__(self) -> None:
        self._of: dict[str, _Prints] = {}  # by what is called
        self._seen: dict[int, Line] = {}  # the last line of each rank, but for errors
        self._labelled: set[int] = set()  # by a launcher's label: of its host, perhaps
        self._ran_out: dict[int, Line] = {}  # that have said little since
        self._after: Counter[int] = Counter()  # lines of these since
        # How often each rank printed lines that are alike but for their numbers
        self._alike: dict[str, Counter[int]] = defaultdict(Counter)
        # By rank, its last lines with what they have in common with others'
        self._lines: dict[int, deque[tuple[str, Line]]] = defaultdict(
            lambda: deque(maxlen=_MOST_LINES)
        )
        self._at_s = 0  # when the last line was written, by the time of the day in it
        self._is_silent = False  # a pause followed the ranks' prints
        self._steps = Steps()  # since then

    def take(self, line: Line, in_traceback: bool = False) -> None:
        rank, text = line.rank, line.text
        if in_traceback:
            return
        own = _OWN.match(text) or (text[-1:].isdecimal() and _AT_THE_END.match(text))
        own = None if text.startswith(_TYPED) else own
        if line.has_prefix or own:
            self._see(int(own[1]) if own and not line.has_prefix else rank, line)
        elif rank >= 0:
            self._labelled.add(rank)
            self._see(rank, line)
        elif _may_be_an_end(text) and _RAN_OUT.search(text):
            ranks = ranks_named_in(text)
            self._ran_out |= dict.fromkeys(ranks if len(ranks) == 1 else (), line)
        elif self._seen:
            self._is_silent |= self._pauses(text)
            self._is_silent &= not self._steps.go_on(text)
        if not self._of and not any(word in text for word in WORDS):
            return
        if not line.has_prefix and (told := _RANK.search(text)):
            rank, text = int(told[1]), text[told.end() :]
        if rank < 0 or _OTHER.search(text):
            return
        if before := _BEFORE.search(text):
            prints = self._named(before["of"])
            if len(prints.last) >= MOST_KEPT:
                return
            prints.called[rank] += 1
            prints.names_calls |= "about to" in text.lower()
            prints.last[rank] = line
            return
        after = _AFTER.search(text)
        is_alone = after is None and _AFTER_ALONE.search(text) is not None
        for name, prints in self._of.items():
            is_its = after is not None and name == _name(after["of"] or after["in"])
            if prints.is_inside(rank) and (is_its or is_alone):
                prints.returned[rank] = prints.called[rank]
                prints.last[rank] = line

    def _see(self, rank: int, line: Line) -> None:
        is_known = rank in self._seen or len(self._seen) < MOST_KEPT
        if not is_known or _OF_TORCH.search(line.text):
            return
        self._seen[rank] = line
        if len(self._alike) < MOST_KEPT:
            shape = _shape(line)
            self._alike[shape][rank] += 1
            self._lines[rank].append((shape, line))
        self._pauses(line.text)
        self._is_silent = False
        self._steps.begin()
        if rank in self._ran_out and "ProcessGroup" not in line.text:
            self._after[rank] += 1
            if self._after[rank] > _MOST_AFTER:
                del self._ran_out[rank]
        elif _may_be_an_end(line.text) and _RAN_OUT.search(line.text):
            self._ran_out[rank] = line
            self._after[rank] = 0

    def leave_out_labels(self) -> None:
        for rank in self._labelled:
            self._seen.pop(rank, None)
            self._ran_out.pop(rank, None)

    def _pauses(self, text: str) -> bool:
        """Whether nothing was written for long before that line."""
        if (clock := _CLOCK.search(text)) is None:
            return False
        hours, minutes, seconds = map(int, clock.groups())
        before, self._at_s = self._at_s, 3600 * hours + 60 * minutes + seconds
        return _SILENCE_S <= (self._at_s - before) % 86_400 <= _MOST_SILENCE_S

    def _not_come(self) -> Finding | None:
        """Where most ranks printed a line last, few did not come to print it, and nothing followed
        for long.
        """
        seen = self._seen
        shapes = [*parties((_shape(line), rank) for rank, line in seen.items()).items()]
        shape, there = shapes[-1] if shapes and self._is_silent else ("", [])
        counts = self._alike.get(shape, Counter())
        first = min((seen[rank].number for rank in there), default=0)
        absent = [rank for rank in seen if seen[rank].number < first]
        is_one = len({counts[rank] for rank in there}) == 1
        # Else a number may be none of a rank.
        is_known = any(one.keys() == seen.keys() for one in self._alike.values())
        is_behind = all(counts[rank] < counts[there[0]] for rank in absent)
        if not (
            is_one and is_known and is_behind and 0 < 2 * len(absent) <= len(there)
        ):
            return None
        if len(there) + len(absent) < len(seen):
            return None
        return _held_up(there, absent, seen, "printed that")

    def _named(self, what: str) -> _Prints:
        return self._of.setdefault(_name(what), _Prints(_name(what)))

    @property
    def seen(self) -> Mapping[int, Line]:
        """By rank, its last line that was read."""
        return self._seen

    @property
    def printed(self) -> dict[int, str]:
        """By rank, its last line that was read, quoted."""
        return {rank: _quoted(line) for rank, line in self._seen.items()}

    @property
    def ran_out(self) -> dict[int, str]:
        """By rank, its line that says that it has no more batches, quoted."""
        return {rank: _quoted(line) for rank, line in self._ran_out.items()}

    @property
    def alone(self) -> dict[int, str]:
        """By rank, what no other rank has printed, quoted. Rank 0 writes many a log by itself."""
        return {
            rank: ", ".join(_quoted(line) for line in told[-_MOST_ALONE:])
            for rank, lines in self._lines.items()
            if rank
            and (told := [x for shape, x in lines if len(self._alike[shape]) == 1])
        }

    def finding(self) -> Finding | None:
        """Of batches that ended on some ranks, else of a call, the encoder's first."""
        if uneven := self._uneven():
            return uneven
        ordered = sorted(self._of.values(), key=lambda one: one.name != _ENCODER)
        told = (one.finding(self._seen) for one in ordered)
        return next(filter(None, told), None) or self._not_come()

    def _uneven(self) -> Finding | None:
        """Where few ranks say that they have no more batches, and all others print after that."""
        ended = self._ran_out
        others = self._seen.keys() - ended.keys()
        if not ended or len(others) < len(ended):
            return None
        last = max(ended.values(), key=lambda line: line.number)
        later = [self._seen[rank] for rank in others]
        if any(
            line.file != last.file
            or line.number < last.number
            or _IS_DONE.search(line.text)
            for line in later
        ):
            return None
        text = (
            f"{_who(ended, ended)} had no more batches, and {_who(others, self._seen)} went"
            f" on. If that is so: {OF_TRAINING}."
        )
        return _guess(text)


def _may_be_an_end(text: str) -> bool:
    return not text.isascii() or any(word in text for word in WORDS_OF_AN_END)


def _shape(line: Line) -> str:
    before = BEFORE_MESSAGE.match(line.text)
    return _NUMBERS.sub("0", line.text[before.end() if before else 0 :])


def _name(what: str) -> str:
    name = what.lower()
    return _ENCODER if name == "encoder" else name
