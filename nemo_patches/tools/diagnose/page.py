"""The page of `diagnose --html`: verdict, ranks in time, their stacks as one tree, what is cited.

One file that needs no other, and has no script. Whatever it shows may come from a file of anybody:
each text goes through _text(), and the page's own policy forbids the browser all but its styles.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path

from nemo_patches import __version__
from nemo_patches.text import named, ranges, safe
from nemo_patches.tools import counted
from nemo_patches.tools.diagnose.findings import Diagnosis, Finding
from nemo_patches.tools.diagnose.report_text import COLUMNS, LEGEND, SENTENCE, row
from nemo_patches.tools.diagnose.verdicts import of_ranks, parties

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
_LONGEST_TEXT = 2000  # characters
_MOST_ROWS = 64  # of the table
_MOST_BRANCHES, _MOST_LEVELS = 64, 64  # that leave one frame; of branches
# A lane's units: across, and down to the waits' foot, the calls' head and foot.
_CELLS, _WAITS_TO, _CALLS_FROM, _CALLS_TO = 300, 16, 18, 22
_MARKS = 100  # places for marks in a lane
_MOST_TICKS = 6
_TICKS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
# A stall that is a smaller share of the whole time has a figure of its own, so many times as long.
_SMALL_SHARE, _AROUND = 0.2, 3.0
_LONGEST_S = 1e9  # a file may claim any time


WAITS, ELSEWHERE, UNKNOWN = "waits-at-end", "elsewhere", "unknown"
_AT_END = {
    WAITS: "it waits for others",
    ELSEWHERE: "it is elsewhere",
    UNKNOWN: "where it is, is not told",
}


@dataclass(frozen=True)
class Mark:
    """at: on its lane's clock. sign: one character. text: what it says."""

    at: float
    sign: str
    text: str


@dataclass(frozen=True)
class Lane:
    """One rank, or the ranks at one place, in seconds on one clock.

    begins: None where no time is known. since: when its last step was, after which it is where
    `state` says; None where it has ended, or goes on. at_end: WAITS, ELSEWHERE or UNKNOWN.
    waits: from when to when it was in length syncs, one after the other. calls: when those of
    encoders began.
    """

    ranks: tuple[int, ...]
    state: str
    process: str = ""
    is_named: bool = False  # by the verdict
    at_end: str = UNKNOWN
    begins: float | None = None
    since: float | None = None
    ends: float = 0.0
    waits: Sequence[float] = ()
    calls: Sequence[float] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Of one rank, outermost frame first. state: what it does there. is_whole: else it is the
    innermost frame and the user's own.
    """

    rank: int
    frames: tuple[str, ...]
    state: str
    details: tuple[str, ...] = ()
    is_whole: bool = True


@dataclass(frozen=True)
class LogLine:
    """cite: "train.log:4711". ranks: that it tells of, in words. text: the line as it is."""

    cite: str
    ranks: str
    text: str


@dataclass(frozen=True)
class ShownJob:
    """started: seconds since 1970 by this host's clock at the time 0 of the lanes; 0: unknown."""

    report: Diagnosis
    lanes: tuple[Lane, ...] = ()
    started: float = 0.0
    host: str = ""
    stacks: tuple[Stack, ...] = ()
    lines: tuple[LogLine, ...] = ()


def page(jobs: Sequence[ShownJob]) -> str:
    style = Path(__file__).with_suffix(".css").read_text("utf-8")
    title = _text(", ".join(job.report.folder for job in jobs[:3]))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title} - nemo-patches diagnose</title>\n<style>\n{style}</style>\n"
        f"</head>\n<body>\n{_PATTERNS}<main>\n{''.join(map(_job, jobs))}</main>\n"
        f"<footer>nemo-patches {__version__} diagnose,"
        f" {_moment(datetime.now(timezone.utc))}</footer>\n</body>\n</html>\n"
    )


_PATTERNS = (
    '<svg class="defs" aria-hidden="true" width="0" height="0"><defs><pattern id="hatch"'
    ' width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="stripe" width="2.5" height="5"/></pattern></defs></svg>\n'
)


def _text(text: str) -> str:
    """For an element, or a quoted attribute."""
    shown = safe(text, _LONGEST_TEXT) + (" ..." if len(text) > _LONGEST_TEXT else "")
    return html.escape(shown)


def _named(ranks: Iterable[int]) -> str:
    return _text(named(ranks))


def _moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _section(title: str, content: str, note: str = "") -> str:
    if not content and not note:
        return ""
    said = f'<p class="note">{note}</p>\n' if note else ""
    return f"<section>\n<h2>{title}</h2>\n{said}{content}</section>\n"


def _list(lines: Iterable[str], kind: str = "lines") -> str:
    items = "".join(f"<li>{_text(line)}</li>\n" for line in lines)
    return f'<ul class="{kind}">\n{items}</ul>\n' if items else ""


def _job(job: ShownJob) -> str:
    report = job.report
    first = report.findings[0] if report.findings else None
    others = "".join(map(_finding, report.findings[1:]))
    notes = [f"Not read, or in part: {one}" for one in report.problems]
    notes += [f"Launches: {one}" for one in report.earlier]
    notes += report.summary if first else ()  # else the verdict has it
    tree = _branches(job.stacks, 0, first.ranks if first else ())
    return (
        f"<article>\n{_verdict(report)}"
        + _section("Ranks in time", _figures(job), _about_times(job))
        + _section("Where the ranks are", tree, _about_stacks(job))
        + _section("Evidence", _list(first.evidence) if first else "")
        + _section("Other findings", others)
        + _section("Lines of logs", _lines(job.lines))
        + _section("Ranks", _ranks(report))
        + _section("Notes", _list(notes))
        + "</article>\n"
    )


def _verdict(report: Diagnosis) -> str:
    first = report.findings[0] if report.findings else None
    kind = f"{first.severity}: {first.id}" if first else "no finding"
    answer, *more = SENTENCE.split(report.verdict, 1)
    rest = "".join(f'<p class="more">{_text(one)}</p>\n' for one in more)
    step = f'<p class="next"><b>Next</b> {_text(report.next_step)}</p>\n'
    size = f", {counted(report.world_size, 'rank')}" if report.world_size else ""
    return (
        f'<header class="is-{first.severity if first else "fine"}">\n'
        f'<p class="kind"><b>{_text(kind)}</b> {_text(report.folder)}{size}</p>\n'
        f"<h1>{_text(answer)}</h1>\n{rest}{step if report.next_step else ''}</header>\n"
    )


def _finding(one: Finding) -> str:
    why = f", follows from {one.because}" if one.because else ""
    step = f'<p class="next"><b>Next</b> {_text(one.next_step)}</p>\n'
    return (
        f'<div class="finding"><h3>{_text(f"{one.severity}: {one.id}{why}")}</h3>\n'
        f"<p>{_text(one.text)}</p>\n{'' if one.because else step}{_list(one.evidence[:4])}</div>\n"
    )


# The ranks in time


@dataclass(frozen=True)
class _Window:
    """The time that a figure shows, at least a tenth of a second. zero: of the job's times."""

    zero: float
    begin: float
    end: float

    def share(self, t: float) -> float:
        """In percent from the left."""
        share = (t - self.begin) / (self.end - self.begin)
        return 100 * min(max(share, 0.0), 1.0)

    def cell(self, t: float) -> int:
        return min(int(_CELLS / 100 * self.share(t)), _CELLS - 1)

    def has(self, t: float) -> bool:
        return self.begin <= t <= self.end

    def clock(self, t: float) -> str:
        return _clock(t - self.zero)


def _whole(lanes: Iterable[Lane]) -> _Window:
    known = [(lane.begins, lane.ends) for lane in lanes if lane.begins is not None]
    end = min(max(ends for _, ends in known), _LONGEST_S)
    begin = max(min(begins for begins, _ in known), -_LONGEST_S)
    begin = min(begin, end - 0.1)
    return _Window(begin, begin, end)


def _clock(seconds: float) -> str:
    """ "0:07", "1:02:03"; of the first seconds "0:00.5"."""
    whole = int(min(seconds, _LONGEST_S))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    tenths = f"{seconds - whole:.1f}"[1:] if whole < 5 and seconds != whole else ""
    return f"{minutes}:{rest:02}{tenths}"


def _about_times(job: ShownJob) -> str:
    if not job.lanes:
        text = (
            "No source has times: traces have, and stacks that nemo-patches collects."
        )
        return text if job.stacks else ""
    zero = "the first record" if job.started else "when the longest wait began"
    with suppress(ValueError, OverflowError, OSError):  # beyond the calendar
        at = datetime.fromtimestamp(job.started + _whole(job.lanes).zero, timezone.utc)
        zero = f"{_moment(at)} by the clock of {_text(job.host)}" if job.host else zero
    return f"In minutes and seconds; 0:00 is {zero}."


def _figures(job: ShownJob) -> str:
    """Of the whole time; where a stall is but a small part of that, of its end first."""
    if not job.lanes:
        return ""
    whole = _whole(job.lanes)
    figure = _figure(job.lanes, whole)
    keys = [key for shape, key in _LEGEND.items() if shape in figure]
    marks = (mark for lane in job.lanes for mark in lane.marks)
    keys += dict.fromkeys(f"<li>{one.sign} {_text(one.text)}</li>" for one in marks)
    legend = f'<ul class="legend">{"".join(keys)}</ul>\n'
    sinces = [lane.since for lane in job.lanes if lane.since is not None]
    stall_s = whole.end - min(sinces, default=whole.begin)
    if not 0.1 < stall_s < _SMALL_SHARE * (whole.end - whole.begin):
        return figure + legend
    last = replace(whole, begin=whole.end - _AROUND * stall_s)
    return (
        f"<h3>The last {_clock(_AROUND * stall_s)}</h3>\n{_figure(job.lanes, last)}{legend}"
        f"<details><summary>The whole time, {whole.clock(whole.end)}</summary>\n"
        f"{figure}</details>\n"
    )


def _key(shape: str, text: str) -> str:
    return f'<li><svg class="key" viewBox="0 0 24 20" aria-hidden="true">{shape}</svg> {text}</li>'


def _block(kind: str, text: str) -> str:
    return _key(f'<rect class="{kind}" width="24" height="20"/>', text)


_CALLS_KEY = '<path class="calls" d="M3 20v-6h2v6zM11 20v-6h2v6zM19 20v-6h2v6z"/>'
# By what is in a figure that shows it.
_LEGEND = {
    'class="calls" d="M': _key(_CALLS_KEY, "encoder calls"),
    f'class="waits" d="M0 {_WAITS_TO}H': _block(
        "waits", "in length syncs: as high as the share of the time"
    ),
    **{
        f'<rect class="{kind}"': _block(kind, f"no step since: {words}")
        for kind, words in _AT_END.items()
    },
}


def _figure(lanes: Iterable[Lane], window: _Window) -> str:
    items = "".join(_lane(lane, window) for lane in lanes)
    ticks = "".join(
        f'<span style="left:{window.share(t):.2f}%">{window.clock(t)}</span>'
        for t in _ticks(window)
    )
    axis = (
        f'<li class="axis" aria-hidden="true"><div class="track">{ticks}</div></li>\n'
    )
    return f'<ol class="lanes" role="list">\n{items}{axis}</ol>\n'


def _ticks(window: _Window) -> Iterator[float]:
    length = window.end - window.begin
    hours = 3600.0 * (1 + length // (3600 * _MOST_TICKS))
    step = next((one for one in _TICKS_S if length / one <= _MOST_TICKS), hours)
    first = math.ceil((window.begin - window.zero) / step)
    for number in range(first, first + _MOST_TICKS + 1):
        t = window.zero + step * number
        if t < window.end - 0.04 * length:  # where its text has room
            yield t


def _lane(lane: Lane, window: _Window) -> str:
    process = f" <small>{_text(lane.process)}</small>" if lane.process else ""
    kind = "named" if lane.is_named else "other"
    return (
        f'<li class="{kind}">'
        f'<div class="who"><b>{_named(lane.ranks)}</b>{process}</div>'
        f'<div class="track">{_track(lane, window)}</div>'
        f'<div class="state">{_text(lane.state)}</div></li>\n'
    )


def _track(lane: Lane, window: _Window) -> str:
    if lane.begins is None:
        return "<small>no record of its times</small>"
    shapes = f'<path class="calls" d="{_calls(lane, window)}"/>'
    shapes += f'<path class="waits" d="{_waits(lane, window)}"/>'
    since = lane.ends if lane.since is None else lane.since
    left, right = window.share(since), window.share(lane.ends)
    if right - left > 0.5:  # else it is no more than a dot
        shapes += (
            f'<rect class="{lane.at_end}" x="{left:.2f}%"'
            f' width="{right - left:.2f}%" height="{_WAITS_TO}"/>'
        )
    return (
        f'<svg viewBox="0 0 {_CELLS} {_CALLS_TO}" preserveAspectRatio="none" role="img"'
        f' aria-label="{_text(_spoken(lane, window))}">{shapes}</svg>{_marks(lane, window)}'
    )


def _calls(lane: Lane, window: _Window) -> str:
    cells = sorted({window.cell(t) for t in lane.calls if window.has(t)})
    height = _CALLS_TO - _CALLS_FROM
    return "".join(
        f"M{first} {_CALLS_FROM}h{last + 1 - first}v{height}H{first}"
        for first, last in ranges(cells)
    )


def _waits(lane: Lane, window: _Window) -> str:
    """In each cell of time as high as the share of it that its ranks waited."""
    width = (window.end - window.begin) / _CELLS
    waited = [0.0] * (_CELLS + 1)
    for start, stop in zip(lane.waits[::2], lane.waits[1::2], strict=True):
        for cell in range(window.cell(start), window.cell(stop) + 1):
            left = window.begin + cell * width
            waited[cell] += max(min(stop, left + width) - max(start, left), 0.0)
    path, before = f"M0 {_WAITS_TO}", 0
    for cell, seconds in enumerate(waited):
        share = min(seconds / width / len(lane.ranks), 1.0)
        if (height := round(_WAITS_TO * share)) != before:
            path += f"H{cell}V{_WAITS_TO - height}"
            before = height
    return path


def _marks(lane: Lane, window: _Window) -> str:
    shown = [mark for mark in lane.marks if window.has(mark.at)]
    places = parties(
        (round(window.share(mark.at) * _MARKS / 100), mark) for mark in shown
    )
    return "".join(
        f'<span class="mark" aria-hidden="true" style="left:{100 * place / _MARKS:g}%"'
        f' title="{_text(", ".join(dict.fromkeys(mark.text for mark in marks)))}">'
        f"{''.join(dict.fromkeys(mark.sign for mark in marks))}</span>"
        for place, marks in sorted(places.items())
    )


def _spoken(lane: Lane, window: _Window) -> str:
    """What the lane shows, in words."""
    told = [f"from {window.clock(lane.begins or 0.0)} to {window.clock(lane.ends)}"]
    if lane.calls:
        told.append(f"the last encoder call at {window.clock(max(lane.calls))}")
    if lane.waits:
        seconds = (sum(lane.waits[1::2]) - sum(lane.waits[::2])) / len(lane.ranks)
        told.append(f"{seconds:.1f} s in length syncs")
    for text, times in parties((mark.text, mark.at) for mark in lane.marks).items():
        told.append(f"{text} at {', '.join(map(window.clock, times[:4]))}")
    if lane.since is not None:
        told.append(f"no step since {window.clock(lane.since)}: {_AT_END[lane.at_end]}")
    return "; ".join(told)


# Their stacks


def _about_stacks(job: ShownJob) -> str:
    partly = [one.rank for one in job.stacks if not one.is_whole]
    return f"Not all frames are known of {_named(partly)}." if partly else ""


def _branches(
    stacks: Sequence[Stack], depth: int, accused: Sequence[int], level: int = 0
) -> str:
    """A branch for each frame at this depth, those of the fewest ranks first."""
    most = _MOST_BRANCHES if level < _MOST_LEVELS else 0
    found = [*parties((one.frames[depth], one) for one in stacks).values()]
    items = "".join(_branch(some, depth, accused, level) for some in found[:most])
    if rest := [one.rank for some in found[most:] for one in some]:
        items += f'<li><b class="ranks">{_named(rest)}</b> in other frames</li>\n'
    return f'<ul class="tree" role="list">\n{items}</ul>\n' if items else ""


def _branch(
    stacks: Sequence[Stack], depth: int, accused: Sequence[int], level: int
) -> str:
    """The frames that these ranks share, to where some leave them; what these do there."""
    levels = zip(*(one.frames[depth:] for one in stacks), strict=False)
    shared = [same[0] for same in takewhile(lambda same: len(set(same)) == 1, levels)]
    end = depth + len(shared)
    there = [one for one in stacks if len(one.frames) == end]
    further = [one for one in stacks if len(one.frames) > end]
    frames = [f"<li><code>{_text(frame)}</code></li>" for frame in shared]
    states = [(one.state, one.rank) for one in there if one.state]
    details = [(detail, one.rank) for one in there for detail in one.details]
    is_open = any(one.rank in accused for one in there)
    count = f" <small>{len(frames)} frames</small>" if len(frames) > 1 else ""
    does = "".join(
        f'<span class="does">{_text(text)}</span>'
        for text in of_ranks(states, len(there))
    )
    return (
        f"<li><details{' open' if is_open else ''}><summary>"
        f'<b class="ranks">{_named(one.rank for one in stacks)}</b>'
        f" <code>{_text(shared[-1])}</code>{count}{does}"
        f'</summary>\n<ol class="frames">{"".join(frames)}</ol>\n'
        f"{_list(of_ranks(details, len(there)))}</details>\n"
        f"{_branches(further, end, accused, level + 1)}</li>\n"
    )


# What it is from


def _lines(lines: Iterable[LogLine]) -> str:
    items = "".join(
        f"<li><cite>{_text(one.cite)}</cite> {_text(one.ranks)}"
        f"<pre><code>{_text(one.text)}</code></pre></li>\n"
        for one in lines
    )
    return f'<ol class="cites" role="list">\n{items}</ol>\n' if items else ""


def _ranks(report: Diagnosis) -> str:
    """The report's table."""
    if not report.ranks:
        return ""
    heads = "".join(f'<th scope="col">{one}</th>' for one in COLUMNS)
    rows = ""
    for one in report.ranks[:_MOST_ROWS]:
        rank, *cells = map(_text, row(one))
        rows += f'<tr><th scope="row">{rank}</th>'
        rows += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    left_out = [one.rank for one in report.ranks[_MOST_ROWS:]]
    more = f'<p class="note">And {_named(left_out)}.</p>\n' if left_out else ""
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="table of ranks"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n{more}"
        f'<p class="note">{LEGEND}</p>\n'
    )
