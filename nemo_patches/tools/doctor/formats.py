"""Print the doctor's reports for GitHub's annotations, and as SARIF for code review tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import nemo_patches
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.finding import Finding, Rule, Severity

_OF_GITHUB = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.NOTE: "notice",
}
_ESCAPED = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_ESCAPED_IN_PROPERTY = str.maketrans(
    {"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"}
)


def github(reports: Sequence[Examination]) -> Iterator[str]:
    """One GitHub workflow command per finding: an annotation on its line of a pull request."""
    for each in reports:
        file = each.name.translate(_ESCAPED_IN_PROPERTY)
        if each.error:
            yield f"::error file={file}::{each.error.translate(_ESCAPED)}"
        for rule, finding in each.findings:
            line = f",line={finding.line}" if finding.line else ""
            text = _text(finding).translate(_ESCAPED)
            yield (
                f"::{_OF_GITHUB[finding.severity]}"
                f" file={file}{line},title={rule.identifier}::{text}"
            )


def sarif(reports: Sequence[Examination], rules: Sequence[Rule]) -> dict[str, Any]:
    unreadable = [
        {"level": "error", "message": {"text": each.error}}
        for each in reports
        if each.error
    ]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "nemo-patches doctor",
                        "version": nemo_patches.__version__,
                        "rules": [_rule(rule) for rule in rules],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": not unreadable,
                        "toolExecutionNotifications": unreadable,
                    }
                ],
                "results": [
                    _result(each.name, rule, finding)
                    for each in reports
                    for rule, finding in each.findings
                ],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    """With a helpUri where the rule's link is one: a document of ours has no address of its own
    yet.
    """
    link = {"helpUri": rule.link} if rule.link.startswith("https://") else {}
    return {
        "id": rule.identifier,
        "shortDescription": {"text": rule.finds},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.why} {rule.link}"},
        "defaultConfiguration": {"level": str(rule.worst)},
        **link,
    }


def _result(name: str, rule: Rule, finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": name.replace("\\", "/")}}
    if finding.line:
        location["region"] = {"startLine": finding.line}
    return {
        "ruleId": rule.identifier,
        "level": str(finding.severity),
        "message": {"text": _text(finding)},
        "locations": [{"physicalLocation": location}],
    }


def _text(finding: Finding) -> str:
    return (
        f"{finding.what}. Instead: {finding.instead}"
        if finding.instead
        else finding.what
    )
