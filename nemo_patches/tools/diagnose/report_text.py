"""Print a report: the verdict, the next step, the evidence, then a table of ranks."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_patches.text import named
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    NOTE,
    Diagnosis,
    Finding,
    RankSummary,
)

_MOST_RANKS = 32  # rows of the table
_WIDEST_HOST = 12  # characters: the table has to fit a terminal of 80
COLUMNS = ("rank", "host", "pid", "calls", "waited", "lag", "last", "at the end")
LEGEND = (
    "waited: seconds in length syncs, also in vain; lag: by how many milliseconds it came after the"
    " first rank, the median; last: seconds since its last call."
)
# The first line is the answer; what follows from it, the second.
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")
_COLOURS = {CRITICAL: "bold red", NOTE: "dim"}


def show(report: Diagnosis, console: Console) -> None:
    """Print a report. Its text may come from files, so no part of it is taken for markup."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    style = "bold green"
    if report.findings:
        style = _COLOURS.get(report.findings[0].severity, "bold yellow")
    for line in SENTENCE.split(report.verdict, 1):
        say(line, style)
    if report.next_step:
        say(f"Next: {report.next_step}")
    for line in report.findings[0].evidence if report.findings else ():
        say(f"  {line}")
    for finding in report.findings[1:]:
        say(f"\n{_title(finding)}: {finding.text}")
        if not finding.because:
            say(f"  Next: {finding.next_step}")
        for line in finding.evidence[:4]:
            say(f"  {line}")
    say("")
    if report.ranks:  # logs and the like have none
        _show_ranks(report, console)
        say(LEGEND, "dim")
    for line in report.summary if report.findings else ():  # else the verdict has it
        say(line)
    for line in report.problems:
        say(f"not read, or in part: {line}")
    for line in report.earlier:
        say(f"launches: {line}")


def _title(finding: Finding) -> str:
    return (
        f"{finding.severity}, follows from {finding.because}"
        if finding.because
        else finding.severity
    )


def _show_ranks(report: Diagnosis, console: Console) -> None:
    """A table of the ranks that a finding names, and of as many others as there is room for."""
    concerned = {
        rank
        for finding in report.findings
        for rank in finding.ranks
        if len(finding.ranks) < _MOST_RANKS
    }
    concerned_first = sorted(
        report.ranks, key=lambda one: (one.rank not in concerned, one.rank)
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS[:3]:
        table.add_column(
            name, max_width=_WIDEST_HOST, no_wrap=True, overflow="ellipsis"
        )
    for name in COLUMNS[3:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(COLUMNS[-1])
    for one in sorted(concerned_first[:_MOST_RANKS], key=lambda each: each.rank):
        style = "bold" if one.rank in concerned else None
        table.add_row(*map(Text, row(one)), style=style)
    console.print(table)
    if left_out := sorted(one.rank for one in concerned_first[_MOST_RANKS:]):
        console.print(
            f"and {named(left_out)}", markup=False, highlight=False, soft_wrap=True
        )


def row(summary: RankSummary) -> list[str]:
    lag = summary.lag * 1000 if summary.lag is not None else None
    return [
        str(summary.rank),
        summary.host,
        str(summary.pid),
        "-" if summary.calls is None else str(summary.calls),
        *map(_seconds, (summary.waited, lag, summary.ago)),
        summary.state,
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
