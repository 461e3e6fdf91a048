"""The report for a person: the verdict, what to do next, then the evidence."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from nemo_patches.stall.rank_text import ranges
from nemo_patches.tools.diagnose.findings import CRITICAL, NOTE, Finding, RankSummary, Report

_MOST_RANKS = 32  # of which a line each is printed
_COLOURS = {CRITICAL: "bold red", NOTE: "dim"}


def show(report: Report, console: Console) -> None:
    """Print it. Nothing of it is taken for markup."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(report.verdict, _COLOURS.get(report.findings[0].severity, "bold yellow") if report.findings else "bold green")
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
    _show_ranks(report, console)
    for line in report.problems:
        say(f"not read, or in part: {line}")
    for line in report.earlier:
        say(f"not diagnosed: {line}")


def _title(finding: Finding) -> str:
    return f"{finding.severity}, follows from {finding.because}" if finding.because else finding.severity


def _show_ranks(report: Report, console: Console) -> None:
    """The ranks that stand out, and as many of the others as there is room for."""
    concerned = {rank for finding in report.findings for rank in finding.ranks if len(finding.ranks) < _MOST_RANKS}
    order = sorted(report.ranks, key=lambda one: (one.rank not in concerned, one.rank))
    shown = sorted(order[:_MOST_RANKS], key=lambda one: one.rank)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "host", "pid"):
        table.add_column(name)
    for name in ("calls", "waited, s", "causes", "lag, ms", "last, s ago"):
        table.add_column(name, justify="right")
    table.add_column("at the end")
    for one in shown:
        table.add_row(*_row(one), style="bold" if one.rank in concerned else None)
    console.print(table)
    left_out = sorted({one.rank for one in report.ranks} - {one.rank for one in shown})
    if left_out:
        runs = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges(left_out))
        console.print(f"and ranks {runs}", markup=False, highlight=False, soft_wrap=True)


def _row(one: RankSummary) -> list[str]:
    return [
        str(one.rank),
        one.host,
        str(one.pid),
        str(one.calls),
        f"{one.waited:.1f}" if one.waited is not None else "-",
        f"{one.caused:.0%}" if one.caused is not None else "-",
        f"{one.lag * 1000:.1f}" if one.lag is not None else "-",
        f"{one.behind:.1f}" if one.behind is not None else "-",
        one.state,
    ]
