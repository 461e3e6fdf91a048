"""Findings that a config's owner has answered: by a comment on the line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Finding, Findings, Rule, warning

RULE = "NP004"
_NEVER = ("NP001", RULE)  # a rule that crashed, and what is wrong with a suppression

_COMMENT = re.compile(
    r"(?P<before>^|.*\s)#\s*nemo-patches:\s*ignore(?:\[(?P<rules>[^\]]*)\])?(?P<reason>.*)$"
)
Pair = tuple[Rule, Finding]


@dataclass(frozen=True)
class Suppression:
    """One rule's findings on one line. place: the line of the comment."""

    rule: str
    reason: str
    line: int
    place: int

    def holds_for(self, rule: Rule, finding: Finding) -> bool:
        if rule.identifier != self.rule or rule.identifier in _NEVER:
            return False
        return self.line in {
            finding.line,
            *(value.line for value in finding.read if value.origin != "default"),
        }


def in_lines(lines: Iterable[tuple[int, str]]) -> list[Suppression]:
    """The suppressions in the comments of a file; of a Python file only the lines with a comment
    are given.
    """
    return [found for number, line in lines for found in _in_line(number, line)]


def _in_line(number: int, line: str) -> Iterator[Suppression]:
    if "nemo-patches" in line and (comment := _COMMENT.match(line)):
        own = comment["before"].strip()
        names = re.split(r"[,\s]+", (comment["rules"] or "").strip().upper())
        for name in names:
            yield Suppression(
                name,
                comment["reason"].strip(),
                line=number if own else number + 1,
                place=number,
            )


def applied(
    suppressions: Sequence[Suppression], findings: Iterable[Pair]
) -> tuple[tuple[Pair, ...], frozenset[Suppression]]:
    """The findings that no suppression answers, and the suppressions that answered one."""
    left = []
    used = set[Suppression]()
    for rule, finding in findings:
        answers = {
            each
            for each in suppressions
            if each.reason and each.holds_for(rule, finding)
        }
        used |= answers
        if not answers:
            left.append((rule, finding))
    return tuple(left), frozenset(used)


def faults(
    own: Sequence[Suppression], used: Collection[Suppression], known: Collection[str]
) -> Findings:
    """What is wrong with the suppressions of one config, whose rules were all checked."""
    for each in own:
        read = Value(
            f"ignore[{each.rule}]",
            each.reason,
            origin=f"line {each.place}",
            line=each.place,
        )
        if each.rule not in known or each.rule in _NEVER:
            what = f"ignore[{each.rule}] names no rule that can be suppressed"
            yield warning(what, read, "# nemo-patches: ignore[NP107] the reason")
        elif not each.reason:
            what = f"ignore[{each.rule}] has no reason, so it suppresses nothing"
            yield warning(what, read, f"# nemo-patches: ignore[{each.rule}] the reason")
        elif each not in used:
            yield warning(
                f"ignore[{each.rule}] suppresses nothing here",
                read,
                "the line without it",
            )
