"""Print the doctor's reports, for a person or for programs, and its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.examination import Examination, Pair
from nemo_patches.tools.doctor.finding import Rule, Severity
from nemo_patches.tools.doctor.interpolations import UNKNOWN

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(
    reports: Sequence[Examination], console: Console, *, quiet: bool = False
) -> None:
    """Print the reports; a note takes one line, any other finding all of its lines, why each
    matters said once.

    quiet: a line for each finding, and nothing else.
    """
    explained: set[str] = set()
    readable = [report for report in reports if not report.error]
    for report in readable:
        if not quiet:
            _print(console, f"{report.name}: {report.headline}")
            for line in report.lines:
                _print(console, line)
        for pair in report.findings:
            _show(console, report.name, pair, explained=None if quiet else explained)
        if not quiet:
            _print(console, f"{report.name}: {_counts([report])}")
    if len(reports) > 1 and not quiet:
        unread = (
            f", {len(reports) - len(readable)} not read"
            if len(reports) > len(readable)
            else ""
        )
        _print(console, f"{len(reports)} configs: {_counts(readable)}{unread}")


def _show(
    console: Console, name: str, pair: Pair, *, explained: set[str] | None
) -> None:
    """explained: the rules of which it has been said why they matter; None for no more than one
    line.
    """
    rule, finding = pair
    where = f"{name}:{finding.line}" if finding.line else name
    head = f"{rule.identifier} {finding.severity}"
    _print(
        console,
        f"{where}: {head}: {finding.what}",
        styled=head,
        style=_STYLES[finding.severity],
    )
    if explained is None or (
        finding.severity is Severity.NOTE and not (rule.whole and finding.instead)
    ):
        return
    if finding.read:
        _print(console, f"    read: {'; '.join(map(str, finding.read))}")
    if finding.instead:
        _print(console, f"    instead: {finding.instead}")
    if rule.identifier not in explained:
        explained.add(rule.identifier)
        _print(console, f"    why: {rule.why} {rule.link}")


def as_json(report: Examination) -> dict[str, Any]:
    """One report, for programs; the docs say what each key is."""
    return {
        "config": report.name,
        "error": report.error or None,
        "unchecked": list(report.unchecked),
        "findings": [
            {
                "rule": rule.identifier,
                "severity": str(finding.severity),
                "line": finding.line,
                "what": finding.what,
                "read": [_value(value) for value in finding.read],
                "instead": finding.instead,
                "why": rule.why,
                "link": rule.link,
            }
            for rule, finding in report.findings
        ],
        **report.details,
    }


def listing(rules: Sequence[Rule]) -> str:
    return "\n".join(
        f"{rule.identifier} ({rule.worst}): {rule.finds}" for rule in rules
    )


def explanation(rule: Rule) -> str:
    examples = (
        f"\n\nbad:\n\n{_indented(rule.bad)}\n\ngood:\n\n{_indented(rule.good)}"
        if rule.bad
        else ""
    )
    return (
        f"{rule.identifier}, at worst:"
        f" {rule.worst}\n{rule.finds}\n{rule.why}\n{rule.link}{examples}"
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def printable(text: str) -> str:
    """Escape what would steer a terminal: a config may have any character in a value."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def _print(console: Console, text: str, styled: str = "", style: str = "") -> None:
    line = Text(printable(text))
    if styled:
        start = line.plain.index(styled)
        line.stylize(style, start, start + len(styled))
    console.print(line, highlight=False, soft_wrap=True)


def _counts(reports: Sequence[Examination]) -> str:
    counts = Counter(
        finding.severity for report in reports for _, finding in report.findings
    )
    worst_first = [
        (counts[severity], severity)
        for severity in reversed(Severity)
        if counts[severity]
    ]
    parts = [counted(count, str(severity)) for count, severity in worst_first] or [
        "nothing"
    ]
    unchecked = sorted({name for report in reports for name in report.unchecked})
    if unchecked:
        parts.append(f"not checked without NeMo: {' and '.join(unchecked)}")
    return ", ".join(parts)


def _value(value: Value) -> dict[str, Any]:
    return {
        "key": value.key,
        "value": plain(value.value),
        "known": value.known,
        "origin": value.origin,
    }


def plain(value: Any) -> Any:
    """A value as JSON can have it, which has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return None if value is UNKNOWN else value
