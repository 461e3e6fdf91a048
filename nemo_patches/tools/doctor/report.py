"""Print the doctor's reports, for a person or for programs, and its rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.finding import ERROR, NOTE, WARNING, Rule, Severity
from nemo_patches.tools.doctor.trees import UNKNOWN

_STYLES = {ERROR: "bold red", WARNING: "yellow", NOTE: "dim"}


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
            _print(console, f"{report.name}: {report.headline}", *report.lines)
        for rule, finding in report.findings:
            where = f"{report.name}:{finding.line}" if finding.line else report.name
            head = f"{rule.identifier} {finding.severity}"
            line = Text(printable(f"{where}: {head}: {finding.what}"))
            line.highlight_words([head], _STYLES[finding.severity])
            console.print(line, highlight=False, soft_wrap=True)
            short = finding.severity is NOTE and not (rule.whole and finding.instead)
            if quiet or short:
                continue
            if finding.read:
                _print(console, f"    read: {'; '.join(map(str, finding.read))}")
            if finding.instead:
                _print(console, f"    instead: {finding.instead}")
            if rule.identifier not in explained:
                explained.add(rule.identifier)
                _print(console, f"    why: {rule.why} {rule.link}")
        if not quiet:
            _print(console, f"{report.name}: {_counts([report])}")
    if len(reports) > 1 and not quiet:
        unread = len(reports) - len(readable)
        also = f", {unread} not read" if unread else ""
        _print(console, f"{len(reports)} configs: {_counts(readable)}{also}")


JSON_FORMAT = 1  # rises where a field changes its meaning, or goes


def as_json(report: Examination) -> dict[str, Any]:
    """One report, for programs; the docs say what each key is."""
    return {
        "format": JSON_FORMAT,
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
    parts = [
        f"{rule.identifier}, at worst: {rule.worst}",
        rule.finds,
        rule.why,
        rule.link,
    ]
    if rule.bad:
        parts += ["", "bad:", "", indent(rule.bad, "    ")]
        parts += ["good:", "", indent(rule.good, "    ")]
    return "\n".join(parts).rstrip()


def printable(text: str) -> str:
    """Escape what would steer a terminal: a config may have any character in a value."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(printable(line)), highlight=False, soft_wrap=True)


def _counts(reports: Sequence[Examination]) -> str:
    found = [finding.severity for report in reports for _, finding in report.findings]
    parts = [
        counted(found.count(severity), str(severity))
        for severity in reversed(Severity)
        if severity in found
    ] or ["nothing"]
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
