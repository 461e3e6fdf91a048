"""Print the doctor's reports, for a person or for programs, and its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_patches.tools.doctor import fixes
from nemo_patches.tools.doctor.config import UNKNOWN, Value
from nemo_patches.tools.doctor.examination import Report
from nemo_patches.tools.doctor.finding import Rule, Severity

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(report: Report, console: Console) -> None:
    """Print one report; a note takes one line, any other finding all of its lines."""
    if report.error:
        return
    _print(console, f"{report.name}: {report.headline}")
    for line in report.lines:
        _print(console, line)
    for rule, finding in report.findings:
        where = f"{report.name}:{finding.line}" if finding.line else report.name
        head = f"{rule.identifier} {finding.severity}"
        _print(console, f"{where}: {head}: {finding.what}", head, _STYLES[finding.severity])
        if finding.severity is Severity.NOTE:
            continue
        if finding.read:
            _print(console, f"    read: {'; '.join(map(str, finding.read))}")
        if finding.instead:
            _print(console, f"    instead: {finding.instead}")
        _print(console, f"    why: {rule.why} {rule.link}")
    _print(console, f"{report.name}: {_counts(report)}")


def as_json(report: Report) -> dict[str, Any]:
    """One report, for programs; the docs say what each key is."""
    return {
        "config": report.name,
        "error": report.error or None,
        "findings": [
            {
                "rule": rule.identifier,
                "severity": str(finding.severity),
                "line": finding.line,
                "what": finding.what,
                "read": [_value(value) for value in finding.read],
                "instead": finding.instead,
                "safe_change": report.config is not None and fixes.can_be_made(report.config, finding.change),
                "why": rule.why,
                "link": rule.link,
            }
            for rule, finding in report.findings
        ],
        **report.details,
    }


def listing(rules: Sequence[Rule]) -> str:
    """One line for each rule."""
    return "\n".join(f"{rule.identifier} ({rule.worst}): {rule.finds}" for rule in rules)


def explanation(rule: Rule) -> str:
    """All that is known of one rule."""
    return f"{rule.identifier}, at worst: {rule.worst}\n{rule.finds}\n{rule.why}\n{rule.link}"


def markdown(rules: Sequence[Rule]) -> str:
    """The table of the rules in docs/doctor.md."""
    rows = [f"| {rule.identifier} | {rule.worst} | {rule.finds} | {rule.why} ({rule.link}) |" for rule in rules]
    return "\n".join(("| rule | at worst | finds | why |", "|---|---|---|---|", *rows))


def printable(text: str) -> str:
    """Escape what would steer a terminal: a config may have any character in a value."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print(console: Console, text: str, styled: str = "", style: str = "") -> None:
    line = Text(printable(text))
    if styled:
        start = line.plain.index(styled)
        line.stylize(style, start, start + len(styled))
    console.print(line, highlight=False, soft_wrap=True)


def _counts(report: Report) -> str:
    counts = Counter(finding.severity for _, finding in report.findings)
    worst_first = [(counts[severity], severity) for severity in reversed(Severity) if counts[severity]]
    return ", ".join(f"{count} {severity}{'s' * (count > 1)}" for count, severity in worst_first) or "nothing"


def _value(value: Value) -> dict[str, Any]:
    plain = None if value.value is UNKNOWN else value.value
    if isinstance(plain, float) and not math.isfinite(plain):
        plain = str(plain)  # JSON has no infinity
    return {"key": value.key, "value": plain, "known": value.known, "origin": value.origin}
