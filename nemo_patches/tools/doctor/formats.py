"""Print the doctor's reports for GitHub's annotations, and as SARIF for code review tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import nemo_patches
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.finding import NOTE, Rule, RuleFinding

_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_TEXT = str.maketrans(_ESCAPED)
_IN_PROPERTY = str.maketrans({**_ESCAPED, ":": "%3A", ",": "%2C"})


def github(reports: Sequence[Examination]) -> Iterator[str]:
    """One GitHub workflow command per finding: an annotation on its line of a pull request."""
    for each in reports:
        file = each.name.translate(_IN_PROPERTY)
        if each.error:
            yield f"::error file={file}::{each.error.translate(_IN_TEXT)}"
        for rule, finding in each.findings:
            line = f",line={finding.line}" if finding.line else ""
            text = _text(finding).translate(_IN_TEXT)
            kind = "notice" if finding.severity is NOTE else finding.severity
            yield f"::{kind} file={file}{line},title={rule.identifier}::{text}"


def sarif(reports: Sequence[Examination], rules: Sequence[Rule]) -> dict[str, Any]:
    """What cannot be read is said on stderr, and by the exit code."""
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
    described: dict[str, Any] = {
        "id": rule.identifier,
        "shortDescription": {"text": rule.finds},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.why} {rule.link}"},
        "defaultConfiguration": {"level": str(rule.worst)},
    }
    if rule.link.startswith("https://"):
        described["helpUri"] = rule.link
    return described


def _result(name: str, rule: Rule, finding: RuleFinding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": name}}
    if finding.line:
        location["region"] = {"startLine": finding.line}
    return {
        "ruleId": rule.identifier,
        "level": str(finding.severity),
        "message": {"text": _text(finding)},
        "locations": [{"physicalLocation": location}],
    }


def _text(finding: RuleFinding) -> str:
    instead = f". Instead: {finding.instead}" if finding.instead else ""
    return finding.what + instead
