"""What the doctor prints: for a person, for programs, and about its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_patches.tools.doctor.config import UNKNOWN, Value
from nemo_patches.tools.doctor.examination import Found, Report
from nemo_patches.tools.doctor.finding import Rule, Severity

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(report: Report, console: Console) -> None:
    """Print one report; of a note one line, of any other finding all."""
    if report.error:
        return
    _print(console, f"{report.name}: {report.headline}")
    for line in report.lines:
        _print(console, line)
    for found in report.found:
        finding = found.finding
        where = f"{report.name}:{finding.line}" if finding.line else report.name
        _print(console, f"{where}: {found.rule.identifier} {finding.severity}: {finding.what}", found)
        if finding.severity is Severity.NOTE:
            continue
        if finding.read:
            _print(console, f"    read: {'; '.join(map(str, finding.read))}")
        if finding.instead:
            _print(console, f"    instead: {finding.instead}")
        _print(console, f"    why: {found.rule.why} {found.rule.link}")
    _print(console, f"{report.name}: {_counts(report)}")


def as_json(report: Report) -> dict[str, Any]:
    """One report, for programs; the docs say what each key is."""
    return {
        "config": report.name,
        "error": report.error or None,
        "findings": [
            {
                "rule": found.rule.identifier,
                "severity": str(found.finding.severity),
                "line": found.finding.line,
                "what": found.finding.what,
                "read": [_value(value) for value in found.finding.read],
                "instead": found.finding.instead,
                "safe_change": found.finding.change is not None,
                "why": found.rule.why,
                "link": found.rule.link,
            }
            for found in report.found
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
    """Without what would steer a terminal: a config may have any character in a value."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print(console: Console, text: str, found: Found | None = None) -> None:
    text = printable(text)
    line = Text(text)
    if found is not None:
        start = text.index(found.rule.identifier)
        end = start + len(f"{found.rule.identifier} {found.finding.severity}")
        line.stylize(_STYLES[found.finding.severity], start, end)
    console.print(line, highlight=False, soft_wrap=True)


def _counts(report: Report) -> str:
    counts = Counter(found.finding.severity for found in report.found)
    said = [
        f"{counts[severity]} {severity}{'s' * (counts[severity] > 1)}"
        for severity in reversed(Severity)
        if counts[severity]
    ]
    return ", ".join(said) or "nothing"


def _value(value: Value) -> dict[str, Any]:
    plain = None if value.value is UNKNOWN else value.value
    if isinstance(plain, float) and not math.isfinite(plain):
        plain = str(plain)  # JSON has no infinity
    return {"key": value.key, "value": plain, "known": value.known, "origin": value.origin}
