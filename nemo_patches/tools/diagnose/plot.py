"""The plot of a job's traces:
time across, ranks down, a stroke for each encoder call, and marks for length syncs that were
given up and for exceptions.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nemo_patches.tools.diagnose.facts import UnreadableError
from nemo_patches.tools.diagnose.sources.traces import RankTrace

_WIDTH_INCHES = 9.6
_TITLE_WIDTH = 110  # characters


def draw(traces: Sequence[RankTrace], file: Path, title: str) -> None:
    """Write the PNG. Raises OSError, and UnreadableError if there is no call to draw."""
    if not any(one.entered for one in traces):
        raise UnreadableError("no encoder call to draw")
    # An exception's text may have dollar signs.
    with rc_context({"text.parse_math": False}):
        height = min(2.0 + 0.25 * len(traces), 40.0)
        figure = Figure((_WIDTH_INCHES, height), dpi=120, layout="constrained")
        axes = figure.subplots()
        for one in traces:
            begin = _offset(one, traces)
            marks = (
                (one.entered, "|", "#4c78a8"),
                (one.gave_up, "v", "#d11149"),
                ([one.raised.t] if one.raised else [], "X", "black"),
            )
            for times, marker, colour in marks:
                at = [begin + t for t in times]
                axes.plot(at, [one.rank] * len(at), marker, color=colour)
        axes.set_xlabel("seconds; | a call, v a length sync given up, X an exception")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.invert_yaxis()
        axes.set_title("\n".join(textwrap.wrap(title, _TITLE_WIDTH)[:4]), loc="left")
        FigureCanvasAgg(figure)
        figure.savefig(file, format="png")


def _offset(one: RankTrace, traces: Sequence[RankTrace]) -> float:
    """Of its clock from the first rank's: a round ends on all ranks at nearly the same moment."""
    last = max(one.rounds.keys() & traces[0].rounds.keys(), default=None)
    if last is None:
        return one.header.started - traces[0].header.started
    return traces[0].rounds[last][0] - one.rounds[last][0]
