"""Findings that a config's owner has answered: by a comment on the line, or by an entry of the
project's file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.finding import Finding, Findings, Rule, note, warning

PROJECT_FILE = ".nemo-patches.yaml"
RULE = "NP004"
_NEVER = ("NP001", RULE)  # a rule that crashed, and what is wrong with a suppression

_COMMENT = re.compile(
    r"(?P<before>^|.*\s)#\s*nemo-patches:\s*ignore(?:\[(?P<rules>[^\]]*)\])?(?P<reason>.*)$"
)
_KEYS = ("rule", "files", "reason")

Pair = tuple[Rule, Finding]


@dataclass(frozen=True)
class Suppression:
    """One rule's findings on one line of a config, or (line 0) in all configs whose path matches
    `files`.
    """

    rule: str
    reason: str
    line: int = 0
    files: str = "*"
    place: int = 0

    def holds_for(self, path: Path, rule: Rule, finding: Finding) -> bool:
        if rule.identifier != self.rule or rule.identifier in _NEVER:
            return False
        if not self.line:
            return self.matches(path)
        return self.line in {
            finding.line,
            *(value.line for value in finding.read if value.origin != "default"),
        }

    def matches(self, path: Path) -> bool:
        """Whether it holds for a file; its pattern may leave out folders in front."""
        return fnmatch(str(path), self.files) or fnmatch(str(path), f"*/{self.files}")


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
                number if own else number + 1,
                place=number,
            )


def of_project(folder: Path = Path()) -> tuple[Suppression, ...]:
    """Those of the project's file in this folder, none where there is no such file. Raises
    DoctorError.
    """
    path = folder / PROJECT_FILE
    if not path.exists():
        return ()
    config = reading.load(path)
    entries = config.tree.get("ignore")
    if set(config.tree) != {"ignore"} or not isinstance(entries, list):
        raise DoctorError(
            f"{path}: found {', '.join(config.tree)}; allowed is a list, ignore, of"
            f" {', '.join(_KEYS)}"
        )
    return tuple(
        _entry(path, config, index, entry) for index, entry in enumerate(entries)
    )


def _entry(
    path: Path, config: reading.Config, index: int, entry: object
) -> Suppression:
    line = config.source.line(("ignore", str(index))) or 0
    given = entry if isinstance(entry, dict) else {}
    wrong = [str(key) for key in given if key not in _KEYS]
    if (
        not all(isinstance(given.get(key, "*"), str) for key in _KEYS)
        or wrong
        or "rule" not in given
    ):
        raise DoctorError(
            f"{path}:{line}: found {', '.join(wrong) or entry}; allowed:"
            f" {', '.join(_KEYS)}, all texts"
        )
    if not given.get("reason", "").strip():
        raise DoctorError(
            f"{path}:{line}: rule {given['rule']} without a reason; allowed: a sentence"
            " on why it is well"
        )
    return Suppression(
        given["rule"].upper(),
        given["reason"],
        files=given.get("files", "*"),
        place=line,
    )


def applied(
    path: Path, suppressions: Sequence[Suppression], findings: Iterable[Pair]
) -> tuple[tuple[Pair, ...], frozenset[Suppression]]:
    """The findings that no suppression answers, and the suppressions that answered one."""
    left = []
    used = set[Suppression]()
    for rule, finding in findings:
        answers = {
            each
            for each in suppressions
            if each.reason and each.holds_for(path, rule, finding)
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


def unused(
    project: Sequence[Suppression], used: Collection[Suppression], paths: Sequence[Path]
) -> Findings:
    """The project's entries that answered nothing in any file which they match; a note, as others
    may not be given.
    """
    for each in project:
        if each not in used and any(map(each.matches, paths)):
            name = f"{each.rule} in {each.files}"
            read = Value(
                f"ignore {name}",
                each.reason,
                origin=f"line {each.place}",
                line=each.place,
            )
            yield note(f"{name}: suppresses nothing in the configs given", read)
