"""The plot of a job: ranks down, calls across, colour for how late each rank came, marks where it went wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.diagnosis import state_of
from nemo_patches.tools.diagnose.folder import Job, UnreadableError
from nemo_patches.tools.diagnose.lateness import late_calls
from nemo_patches.tools.diagnose.rank_trace import RAISED, TIMEOUT, UNWAITED

_MOST_COLUMNS = 1200  # more calls than that are binned
_MOST_LABELS = 40  # more ranks than that are not labelled one by one
_LEAST_LAG_S, _LARGE_LAG_S = 0.01, 1.0  # the ends of the colour scale, unless a rank came later
_FEW_CALLS = 60  # up to so many calls the marks are larger
_RARE = 2  # index in _MARKS: from here on marks are never made smaller, and the first ones have their rank beside them
_MOST_NAMED = 12  # of each rare mark
_LAG_NOT_KNOWN, _NO_CALL = "#e4e4e4", "white"
_MARKS = (
    ("own length, no wait", ".", "#4aa3df", 14.0),
    ("gave up waiting", "v", "#1f5fd0", 30.0),
    ("came too late, or never", "D", "#d11149", 30.0),
    ("an exception", "X", "#111111", 46.0),
)

Lags = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


def draw(job: Job, file: Path) -> None:
    """Write the PNG. Raises OSError, and UnreadableError if there is no call to draw."""
    encoders = [case for case in cases(job) if case.rounds.ranks]
    if not encoders:
        raise UnreadableError(f"{job.folder}: no encoder call to draw")
    case = encoders[0]
    ranks = sorted(job.traces)
    first = min(track.calls.n[0] for track in case.tracks.values() if track.calls.n)
    last = max(track.last for track in case.tracks.values())
    width = -(-(last - first + 1) // _MOST_COLUMNS)
    edges = first - 0.5 + width * np.arange(-(-(last - first + 1) // width) + 1, dtype=np.float64)
    lags, there = _lags(case, ranks, edges)

    height = float(np.clip(1.9 + 0.32 * len(ranks), 2.7, 11.0))
    figure = Figure(figsize=(14.0, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
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
        cmap="YlOrRd",
        norm=LogNorm(_LEAST_LAG_S, largest),
    )
    bar = figure.colorbar(
        image, ax=axes, pad=0.01, fraction=0.03 if height < 8 else 0.02, aspect=40 if height > 8 else 20
    )
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
    bar.set_label("came later than the first")
    handles = _mark(axes, case, ranks, edges)
    _label(axes, case, ranks)
    axes.set_xlabel(f"call of {case.name}" + (f" ({width} to a column)" if width > 1 else ""))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_title(f"{len(ranks)} of {job.world_size} ranks, calls {first} to {last}", loc="left", fontsize=11)
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handletextpad=0.3,
        columnspacing=1.2,
    )
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _lags(case: Case, ranks: list[int], edges: Lags) -> tuple[Lags, npt.NDArray[np.bool_]]:
    """The largest lag of each rank and column, in seconds, NaN if not known; and where there are calls."""
    bins = len(edges) - 1
    lags = np.full((len(ranks), bins), -1.0)
    there = np.zeros((len(ranks), bins), dtype=bool)
    for row, rank in enumerate(ranks):
        track = case.tracks.get(rank)
        if track is not None and track.calls.n:
            there[row, _columns(np.array(track.calls.n), edges)] = True
    for rank, index, lag in zip(case.rounds.ranks, case.rounds.index, case.rounds.lag, strict=True):
        numbers = np.array(case.tracks[rank].calls.n)[index]
        np.maximum.at(lags[ranks.index(rank)], _columns(numbers, edges), lag)
    lags[lags < 0] = np.nan
    return lags, there


def _columns(numbers: Numbers, edges: Lags) -> Numbers:
    width = edges[1] - edges[0]
    columns: Numbers = np.clip(((numbers - edges[0]) / width).astype(np.int64), 0, len(edges) - 2)
    return columns


def _mark(axes, case: Case, ranks: list[int], edges: Lags) -> list[Line2D]:  # type: ignore[no-untyped-def]
    """Draw at most one mark of each kind for each rank and column; return the legend's entries."""
    crowded = len(ranks) > _MOST_LABELS
    roomy = 3.0 if len(edges) <= _FEW_CALLS and not crowded else 1.0
    handles = [
        Line2D([], [], marker="s", linestyle="", color=_LAG_NOT_KNOWN, markersize=8, label="a call, lag not known")
    ]
    middles = (edges[:-1] + edges[1:]) / 2
    late = late_calls(case)
    for number, (title, marker, colour, size) in enumerate(_MARKS):
        across, down = [], []
        for row, rank in enumerate(ranks):
            numbers = _marked(case, rank, late)[number]
            columns = np.unique(_columns(numbers, edges))
            across += middles[columns].tolist()
            down += [row] * len(columns)
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
        if crowded and number >= _RARE:
            for at, row in list(zip(across, down, strict=True))[:_MOST_NAMED]:
                near_the_end = at > edges[0] + 0.9 * (edges[-1] - edges[0])
                axes.annotate(
                    f"rank {ranks[row]}",
                    (at, row),
                    (-9 if near_the_end else 9, 0),
                    textcoords="offset points",
                    ha="right" if near_the_end else "left",
                    va="center",
                    color=colour,
                    fontsize=9,
                    fontweight="bold",
                )
        handles.append(Line2D([], [], marker=marker, linestyle="", color=colour, markersize=7, label=title))
    return handles


def _marked(case: Case, rank: int, late: dict[int, list[int]]) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """A rank's calls for each of _MARKS."""
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


def _label(axes, case: Case, ranks: list[int]) -> None:  # type: ignore[no-untyped-def]
    """Label each rank with its state at the end; many ranks only with some of their numbers."""
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    if len(ranks) > _MOST_LABELS:
        axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda row, _: str(ranks[int(row)]) if 0 <= row < len(ranks) and row == int(row) else "")
        )
        axes.set_ylabel("rank")
        return
    axes.set_yticks(range(len(ranks)), [f"rank {rank}, {state_of(case.endings[rank])}" for rank in ranks], fontsize=9)
    axes.set_yticks(np.arange(len(ranks) - 1) + 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=2.0 if len(ranks) < 12 else 1.0)
    axes.tick_params(which="minor", length=0)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
