"""The plot of a job: ranks down, calls across, colour for how late each rank came, marks where it
went wrong.

The verdict is its title, each encoder has a panel, and the ranks that the verdict names have the
one strong colour.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
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
from nemo_patches.tools.diagnose.lateness import late_calls
from nemo_patches.tools.diagnose.rank_trace import RAISED, TIMEOUT, UNWAITED

_MOST_PANELS = 4  # of encoders, those with the most calls
_MOST_COLUMNS = 1200  # more calls than that are binned
_MOST_LABELS = 40  # more ranks than that are not labelled one by one
_MOST_HOSTS = 24  # that are labelled
_LEAST_LAG_S = 0.01  # the ends of the colour scale, unless a rank came later
_LARGE_LAG_S = 1.0
_TITLE_WIDTH = 110  # characters
_TITLE_LINES = 4
# Documents show it 850 pixels wide: text is as large there as theirs.
_WIDTH_INCHES = 9.6
_DOTS_PER_INCH = 160
_FONT_POINTS = 9.5
_LAG_NOT_KNOWN = "#e4e4e4"
_CULPRIT = "#d11149"
_MARKS = (  # what it says, its form, colour and size
    ("own length, no wait", ".", "#7d8597", 14.0),
    ("gave up waiting", "v", "#33415c", 30.0),
    ("came too late, or never", "D", _CULPRIT, 40.0),
    ("an exception", "X", "#1d1133", 46.0),
)


def draw(job: TracedJob, file: Path, report: Diagnosis) -> None:
    """Write the PNG. Raises OSError, and UnreadableError if there is no call to draw."""
    # An exception's text may have dollar signs.
    with rc_context({"text.parse_math": False, "font.size": _FONT_POINTS}):
        _draw(job, file, report)


def _draw(job: TracedJob, file: Path, report: Diagnosis) -> None:
    encoders = [case for case in cases(job) if case.rounds.ranks]
    if not encoders:
        raise UnreadableError(f"{job.folder}: no encoder call to draw")
    panels = encoders[:_MOST_PANELS]
    ranks = sorted(job.traces)
    blamed = report.findings[0].ranks if report.findings else ()
    culprits = set(blamed) if len(blamed) < job.world_size else set()
    title = textwrap.wrap(
        report.verdict, _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" ..."
    )
    panel = float(np.clip(1.4 + 0.27 * len(ranks), 2.0, 8.0 / len(panels) ** 0.5))
    size = (_WIDTH_INCHES, panel * len(panels) + 0.2 * len(title))
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(
        "\n".join(title),
        x=0.01,
        ha="left",
        fontsize=_FONT_POINTS + 0.5,
        fontweight="bold",
    )
    for axes, case in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        _panel(figure, axes, case, ranks, culprits)
    if more := encoders[_MOST_PANELS:]:
        figure.supxlabel(f"not drawn: {', '.join(case.name for case in more)}")
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _panel(
    figure: Figure, axes: Any, case: Case, ranks: list[int], culprits: set[int]
) -> None:
    first = min(track.calls.n[0] for track in case.tracks.values() if track.calls.n)
    last = max(track.last for track in case.tracks.values())
    width = -(-(last - first + 1) // _MOST_COLUMNS)
    edges = (
        first
        - 0.5
        + width * np.arange(-(-(last - first + 1) // width) + 1, dtype=np.float64)
    )
    lags = _lags(case, ranks, edges)
    extent = (edges[0], edges[-1], len(ranks) - 0.5, -0.5)
    look = {"aspect": "auto", "extent": extent, "interpolation": "nearest"}
    is_known = lags > 0
    axes.imshow(
        np.ma.masked_array(np.zeros(lags.shape), np.isnan(lags) | is_known),
        cmap=ListedColormap([_LAG_NOT_KNOWN]),
        **look,
    )
    largest = max(float(np.nanmax(lags, initial=0.0)), _LARGE_LAG_S)
    image = axes.imshow(
        np.ma.masked_array(np.clip(lags, _LEAST_LAG_S, None), ~is_known),
        cmap="Blues",
        norm=LogNorm(_LEAST_LAG_S, largest),
        **look,
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
    bar.set_label("came later than the first")
    _label(axes, case, ranks, culprits)
    several = f", {width} to a column" if width > 1 else ""
    axes.set_xlabel(
        f"call of {case.name}: {len(ranks)} of {case.job.world_size} ranks, calls"
        f" {first} to {last}{several}"
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    handles = _mark(axes, case, ranks, edges)
    if (lags == 0).any():
        handles.append(_legend_entry("a call, lag not known", "s", _LAG_NOT_KNOWN))
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=max(len(handles), 1),
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.0,
    )


def _lags(case: Case, ranks: list[int], edges: Floats) -> Floats:
    """By rank and column the largest lag in seconds; 0 where it is not known, NaN where there is no
    call.
    """
    lags = np.full((len(ranks), len(edges) - 1), np.nan)
    for row, rank in enumerate(ranks):
        track = case.tracks.get(rank)
        if track is not None and track.calls.n:
            lags[row, _columns(np.array(track.calls.n), edges)] = 0.0
    for rank, index, lag in zip(
        case.rounds.ranks, case.rounds.index, case.rounds.lag, strict=True
    ):
        numbers = np.array(case.tracks[rank].calls.n)[index]
        # The first rank's lag is 0, which is known.
        np.maximum.at(
            lags[ranks.index(rank)],
            _columns(numbers, edges),
            np.maximum(lag, _LEAST_LAG_S / 2),
        )
    return lags


def _columns(numbers: Whole, edges: Floats) -> Whole:
    width = edges[1] - edges[0]
    columns: Whole = np.clip(
        ((numbers - edges[0]) / width).astype(np.int64), 0, len(edges) - 2
    )
    return columns


def _mark(axes: Any, case: Case, ranks: list[int], edges: Floats) -> list[Line2D]:
    """Draw at most one mark of each kind for each rank and column; return the legend's entries for
    what was drawn.
    """
    late = late_calls(case)
    marked = [_marked(case, rank, late.get(rank, [])) for rank in ranks]
    middles = (edges[:-1] + edges[1:]) / 2
    handles = []
    for number, (title, marker, colour, size) in enumerate(_MARKS):
        across: list[float] = []
        down: list[int] = []
        for row, of_rank in enumerate(marked):
            columns = np.unique(_columns(of_rank[number], edges))
            across += middles[columns].tolist()
            down += [row] * len(columns)
        if across:
            look = {
                "s": size,
                "marker": marker,
                "color": colour,
                "linewidths": 0.4,
                "edgecolors": "white",
            }
            axes.scatter(across, down, zorder=3, clip_on=False, **look)
            handles.append(_legend_entry(title, marker, colour))
    return handles


def _marked(
    case: Case, rank: int, late: list[int]
) -> tuple[Whole, Whole, Whole, Whole]:
    """The numbers of its calls that have each of _MARKS."""
    track = case.tracks.get(rank)
    numbers = np.array(track.calls.n if track is not None else [], np.int64)
    outcome = np.array(track.calls.outcome if track is not None else [])
    ended = np.array(track.calls.ended if track is not None else [])
    given_up = numbers[outcome == TIMEOUT]
    return (
        numbers[outcome == UNWAITED],
        given_up,
        np.array(late, np.int64),
        numbers[ended == RAISED],
    )


def _legend_entry(text: str, marker: str, colour: str) -> Line2D:
    return Line2D(
        [], [], marker=marker, linestyle="", color=colour, markersize=7, label=text
    )


def _label(axes: Any, case: Case, ranks: list[int], culprits: set[int]) -> None:
    """Label each rank with its last call; of many ranks only the hosts, and those to blame."""
    ticks = dict(enumerate(labels(case, ranks)))
    if len(ranks) <= _MOST_LABELS:
        axes.set_yticks(np.arange(len(ranks) - 1) + 0.5, minor=True)
        axes.grid(which="minor", axis="y", color="white", linewidth=2.0)
        axes.tick_params(which="minor", length=0)
    else:
        hosts = [_host(case, rank) for rank in ranks]
        runs = [
            (host, [row for row, _ in rows])
            for host, rows in groupby(enumerate(hosts), key=lambda one: one[1])
        ]
        shown = runs[:: -(-len(runs) // _MOST_HOSTS)]
        ticks = {
            rows[0]: f"{host}: {ranks[rows[0]]}-{ranks[rows[-1]]}"
            for host, rows in shown
        }
        blamed = [row for row, rank in enumerate(ranks) if rank in culprits][
            :_MOST_HOSTS
        ]
        apart = len(ranks) / 30  # rows between two labels
        ticks = {
            row: text
            for row, text in ticks.items()
            if all(abs(row - other) > apart for other in blamed)
        }
        ticks |= {row: f"rank {ranks[row]}, {hosts[row]}" for row in blamed}
    axes.set_yticks(list(ticks), list(ticks.values()))
    for row, label in zip(ticks, axes.get_yticklabels(), strict=True):
        if ranks[row] in culprits:
            label.set(color=_CULPRIT, fontweight="bold")


def labels(case: Case, ranks: list[int]) -> list[str]:
    """Each rank and its last call, with the host before the first of its ranks."""
    texts = []
    before = ""
    for rank in ranks:
        host = _host(case, rank)
        at = "" if host == before else f"{host}  "
        texts.append(f"{at}rank {rank}, {_last_call(case.endings[rank])}")
        before = host
    return texts


def _host(case: Case, rank: int) -> str:
    return safe(case.job.traces[rank].header.host)[:24]


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
