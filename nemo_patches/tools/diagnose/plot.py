"""The plot of a job: ranks down, calls across, colour for how late each rank came, marks where it went wrong.

The verdict is its title, each encoder has a panel, and the ranks that the verdict names have the one strong colour.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.alignment import Floats, Whole
from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.folder import TracedJob, UnreadableError
from nemo_patches.tools.diagnose.lateness import late_calls, late_seconds
from nemo_patches.tools.diagnose.rank_trace import RAISED, TIMEOUT, UNWAITED

_MOST_PANELS = 4  # of encoders, those with the most calls
_MOST_COLUMNS = 1200  # more calls than that are binned
_MOST_LABELS = 40  # more ranks than that are not labelled one by one
_LEAST_LAG_S, _LARGE_LAG_S = 0.01, 1.0  # the ends of the colour scale, unless a rank came later
_FEW_CALLS = 60  # up to so many calls the marks are larger
_RARE = 2  # index in _MARKS: from here on marks are never made smaller, and the first ones have words beside them
_MOST_NAMED = 12  # of each rare mark
_TITLE_WIDTH, _TITLE_LINES = 110, 4  # characters, lines
# Documents show it 850 pixels wide: text is as large there as theirs.
_WIDTH_INCHES, _DOTS_PER_INCH, _FONT_POINTS = 9.6, 160, 9.5
_LAG_NOT_KNOWN, _NO_CALL, _CULPRIT = "#e4e4e4", "white", "#d11149"
_KINDS = (("training", "#c9b458"), ("evaluation", "#2a9d8f"))
_MARKS = (
    ("own length, no wait", ".", "#7d8597", 14.0),
    ("gave up waiting", "v", "#33415c", 30.0),
    ("came too late, or never", "D", _CULPRIT, 30.0),
    ("an exception", "X", "#1d1133", 46.0),
)


def draw(job: TracedJob, file: Path, report: Diagnosis) -> None:
    """Write the PNG. Raises OSError, and UnreadableError if there is no call to draw."""
    with rc_context({"text.parse_math": False, "font.size": _FONT_POINTS}):  # an exception's text may have dollar signs
        _draw(job, file, report)


def _draw(job: TracedJob, file: Path, report: Diagnosis) -> None:
    encoders = [case for case in cases(job) if case.rounds.ranks]
    if not encoders:
        raise UnreadableError(f"{job.folder}: no encoder call to draw")
    panels = encoders[:_MOST_PANELS]
    ranks = sorted(job.traces)
    blamed = report.findings[0].ranks if report.findings else ()
    culprits = set(blamed) if len(blamed) < job.world_size else set()
    title = textwrap.wrap(report.verdict, _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" ...")
    panel = float(np.clip(1.4 + 0.27 * len(ranks), 2.0, 8.0 / len(panels) ** 0.5))
    size = (_WIDTH_INCHES, panel * len(panels) + 0.2 * len(title))
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=_FONT_POINTS + 0.5, fontweight="bold")
    for axes, case in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _panel(figure, axes, case, ranks, culprits)
    if more := encoders[_MOST_PANELS:]:
        figure.supxlabel(f"not drawn: {', '.join(case.name for case in more)}")
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _panel(figure: Figure, axes: Any, case: Case, ranks: list[int], culprits: set[int]) -> None:
    first = min(track.calls.n[0] for track in case.tracks.values() if track.calls.n)
    last = max(track.last for track in case.tracks.values())
    width = -(-(last - first + 1) // _MOST_COLUMNS)
    edges = first - 0.5 + width * np.arange(-(-(last - first + 1) // width) + 1, dtype=np.float64)
    lags, there, kinds = _cells(case, ranks, edges)

    axes.set_facecolor(_NO_CALL)
    extent = (edges[0], edges[-1], len(ranks) - 0.5, -0.5)
    calls = np.ma.masked_array(np.zeros(there.shape), ~there)
    axes.imshow(calls, aspect="auto", extent=extent, interpolation="nearest", cmap=ListedColormap([_LAG_NOT_KNOWN]))
    largest = max(float(np.nanmax(lags, initial=0.0)), _LARGE_LAG_S)
    image = axes.imshow(
        np.ma.masked_invalid(np.clip(lags, _LEAST_LAG_S, None)),
        aspect="auto",
        extent=extent,
        interpolation="nearest",
        cmap="Blues",
        norm=LogNorm(_LEAST_LAG_S, largest),
    )
    strip = 0.06 + 0.03 * len(ranks)  # above the ranks: which calls are training calls
    axes.imshow(
        np.ma.masked_less(kinds[None, :], 0),
        aspect="auto",
        extent=(edges[0], edges[-1], -0.5 - strip / 3, -0.5 - strip),
        interpolation="nearest",
        cmap=ListedColormap([colour for _, colour in _KINDS]),
        vmin=0,
        vmax=1,
    )
    axes.set_xlim(edges[0], edges[-1])
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
    bar.set_label("came later than the first")
    handles = [_legend_entry(text, "s", colour) for text, colour in _squares(kinds, lags, there)]
    handles += _mark(axes, case, ranks, edges)
    _label(axes, case, ranks, culprits)
    axes.set_ylim(len(ranks) - 0.5, -0.5 - strip)
    several = f", {width} to a column" if width > 1 else ""
    axes.set_xlabel(
        f"call of {case.name}: {len(ranks)} of {case.job.world_size} ranks, calls {first} to {last}{several}"
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.0,
    )


def _cells(case: Case, ranks: list[int], edges: Floats) -> tuple[Floats, npt.NDArray[np.bool_], Whole]:
    """By rank and column: the largest lag in seconds, NaN if not known, and whether there are calls. By column: 1 for
    evaluation, 0 for training, -1 for none.
    """
    bins = len(edges) - 1
    lags = np.full((len(ranks), bins), -1.0)
    there = np.zeros((len(ranks), bins), dtype=bool)
    kinds = np.full(bins, -1, np.int64)
    for row, rank in enumerate(ranks):
        track = case.tracks.get(rank)
        if track is not None and track.calls.n:
            columns, training = _columns(np.array(track.calls.n), edges), np.array(track.calls.training)
            there[row, columns] = True
            kinds[columns[training == 1]] = 0
            kinds[columns[training == 0]] = 1
    for rank, index, lag in zip(case.rounds.ranks, case.rounds.index, case.rounds.lag, strict=True):
        numbers = np.array(case.tracks[rank].calls.n)[index]
        np.maximum.at(lags[ranks.index(rank)], _columns(numbers, edges), lag)
    for (rank, call), late in late_seconds(case).items():
        (column,) = _columns(np.array([call]), edges)
        lags[ranks.index(rank), column] = max(lags[ranks.index(rank), column], late)
        there[ranks.index(rank), column] = True
    lags[lags < 0] = np.nan
    return lags, there, kinds


def _columns(numbers: Whole, edges: Floats) -> Whole:
    width = edges[1] - edges[0]
    columns: Whole = np.clip(((numbers - edges[0]) / width).astype(np.int64), 0, len(edges) - 2)
    return columns


def _mark(axes: Any, case: Case, ranks: list[int], edges: Floats) -> list[Line2D]:
    """Draw at most one mark of each kind for each rank and column; return the legend's entries for what was drawn."""
    crowded = len(ranks) > _MOST_LABELS
    roomy = 3.0 if len(edges) <= _FEW_CALLS and not crowded else 1.0
    handles = []
    middles = (edges[:-1] + edges[1:]) / 2
    late, seconds = late_calls(case), late_seconds(case)
    for number, (title, marker, colour, size) in enumerate(_MARKS):
        across, down, words = [], [], []
        for row, rank in enumerate(ranks):
            numbers = _marked(case, rank, late)[number]
            columns, at = np.unique(_columns(numbers, edges), return_index=True)
            across += middles[columns].tolist()
            down += [row] * len(columns)
            for call in numbers[at].tolist():
                how_late = _how_late(case, rank, call, seconds) if number == _RARE else ""
                words.append(", ".join(filter(None, [f"rank {rank}" if crowded else "", how_late])))
        if not across:
            continue
        axes.scatter(
            across,
            down,
            s=size * (0.35 if crowded and number < _RARE else roomy),
            marker=marker,
            color=colour,
            linewidths=0.4,
            edgecolors="white",
            zorder=3,
            clip_on=False,
        )
        if number >= _RARE:
            for column, row, said in list(zip(across, down, words, strict=True))[:_MOST_NAMED]:
                near_the_end = column > edges[0] + 0.9 * (edges[-1] - edges[0])
                axes.annotate(
                    said,
                    (column, row),
                    (-9 if near_the_end else 9, 0),
                    textcoords="offset points",
                    ha="right" if near_the_end else "left",
                    va="center",
                    color=colour,
                    fontweight="bold",
                    bbox={"color": "white", "alpha": 0.7, "pad": 0.5},
                )
        handles.append(_legend_entry(title, marker, colour))
    return handles


def _legend_entry(text: str, marker: str, colour: str) -> Line2D:
    return Line2D([], [], marker=marker, linestyle="", color=colour, markersize=7, label=text)


def _squares(kinds: Whole, lags: Floats, there: npt.NDArray[np.bool_]) -> list[tuple[str, str]]:
    """The legend's texts and colours of the squares that were drawn."""
    squares = [of_kind for number, of_kind in enumerate(_KINDS) if (kinds == number).any()]
    return squares + ([("a call, lag not known", _LAG_NOT_KNOWN)] if (there & np.isnan(lags)).any() else [])


def _how_late(case: Case, rank: int, call: int, seconds: dict[tuple[int, int], float]) -> str:
    if (rank, call) not in seconds:
        return ""
    track = case.tracks.get(rank)
    came = track is not None and call <= track.last
    return f"{seconds[rank, call]:.1f} s late" if came else f"never came, {seconds[rank, call]:.1f} s"


def _marked(case: Case, rank: int, late: dict[int, list[int]]) -> tuple[Whole, Whole, Whole, Whole]:
    track = case.tracks.get(rank)
    if track is None or not track.calls.n:
        none = np.zeros(0, np.int64)
        return none, none, np.array(late.get(rank, []), np.int64), none
    numbers = np.array(track.calls.n, np.int64)
    outcome, ended = np.array(track.calls.outcome), np.array(track.calls.ended)
    return (
        numbers[outcome == UNWAITED],
        numbers[outcome == TIMEOUT],
        np.array(late.get(rank, []), np.int64),
        numbers[ended == RAISED],
    )


def _label(axes: Any, case: Case, ranks: list[int], culprits: set[int]) -> None:
    """Label hosts, and each rank with its state at the end; of many ranks only the hosts, and those to blame."""
    hosts = _hosts(case, ranks)
    starts = _starts(hosts)
    if len(ranks) > _MOST_LABELS:
        runs = [(host, [row for row, _ in rows]) for host, rows in groupby(enumerate(hosts), key=lambda pair: pair[1])]
        shown = runs[:: -(-len(runs) // 24)]
        ticks = {rows[0]: f"{host}: {ranks[rows[0]]}-{ranks[rows[-1]]}" for host, rows in shown}
        blamed = [row for row, rank in enumerate(ranks) if rank in culprits][:_MOST_NAMED]
        apart = len(ranks) / 30  # rows between two labels
        ticks = {row: text for row, text in ticks.items() if all(abs(row - other) > apart for other in blamed)}
        ticks |= {row: f"rank {ranks[row]}, {hosts[row]}" for row in blamed}
    else:
        ticks = dict(enumerate(labels(case, ranks)))
        axes.set_yticks(np.arange(len(ranks) - 1) + 0.5, minor=True)
        axes.grid(which="minor", axis="y", color="white", linewidth=2.0 if len(ranks) < 12 else 1.0)
        axes.tick_params(which="minor", length=0)
    if 1 < len(starts) <= _MOST_LABELS:
        for row in starts[1:]:
            axes.axhline(row - 0.5, color="#9aa0a6", linewidth=0.8)
    axes.set_yticks(list(ticks), list(ticks.values()))
    for row, label in zip(ticks, axes.get_yticklabels(), strict=True):
        if ranks[row] in culprits:
            label.set(color=_CULPRIT, fontweight="bold")
    for row, rank in enumerate(ranks):
        if rank in culprits and len(culprits) <= _MOST_NAMED:
            axes.axhspan(
                row - 0.5,
                row + 0.5,
                fill=False,
                edgecolor=_CULPRIT,
                linewidth=1.6 if len(ranks) <= _MOST_LABELS else 0.8,
                zorder=2.5,
            )


def labels(case: Case, ranks: list[int]) -> list[str]:
    """Each rank and its last call, with the host before the first of its ranks."""
    hosts = _hosts(case, ranks)
    before = {row: f"{hosts[row]}  " for row in _starts(hosts)}
    return [f"{before.get(row, '')}rank {rank}, {_last_call(case.endings[rank])}" for row, rank in enumerate(ranks)]


def _hosts(case: Case, ranks: list[int]) -> list[str]:
    return [safe(case.job.traces[rank].header.host)[:24] for rank in ranks]


def _starts(hosts: list[str]) -> list[int]:
    """The rows at which another host begins."""
    return [row for row in range(len(hosts)) if not row or hosts[row] != hosts[row - 1]]


def _last_call(ending: Ending) -> str:
    if not ending.call:
        return "no call"
    if ending.unsure:
        return "last call not known"
    call = f"last call {ending.call}"
    if ending.raised:
        return f"{call}: exception"
    if ending.ended:
        return f"{call}, then ended"
    return f"{call}, still in it" if ending.inside else call


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
