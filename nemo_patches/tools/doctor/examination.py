"""One run of the doctor: rules chosen, what they are about read, each checked on it, and what was found."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_patches.sync import settings
from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import machine
from nemo_patches.tools.doctor.config import Config
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.finding import Finding, Rule, Severity
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.rules import all_rules
from nemo_patches.tools.doctor.yaml_text import ConfigError

CRASHED = "NP001"


@dataclass(frozen=True)
class Found:
    """A finding, and the rule that it is of."""

    rule: Rule
    finding: Finding


@dataclass(frozen=True)
class Report:
    """What was found in one config, on this machine or between ranks, worst first; or why it cannot be read.

    headline: one line on what the rules went by. lines: what else is to be printed before the findings. config: None
    where none was read. details: for programs.
    """

    name: str
    headline: str
    found: tuple[Found, ...]
    error: str = ""
    config: Config | None = None
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: nothing but notes; 1: findings; 2: it cannot be read."""
        if self.error:
            return 2
        return 1 if any(found.finding.severity > Severity.NOTE for found in self.found) else 0


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The configs and the overrides among the command's arguments: what has a = or a leading ~ is an override."""
    overrides = [text for text in arguments if text.startswith("~") or ("=" in text and not Path(text).exists())]
    return [Path(text) for text in arguments if text not in overrides], overrides


def chosen(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """The rules whose identifiers begin with one of `select` (none: all) and with none of `ignore`.

    Raises DoctorError for one that no rule's identifier begins with.
    """
    rules = all_rules()
    wanted, unwanted = _identifiers(select), _identifiers(ignore)
    for identifier in (*wanted, *unwanted):
        if not any(rule.identifier.startswith(identifier) for rule in rules):
            raise _no_rule(identifier)
    return tuple(
        rule
        for rule in rules
        if (not wanted or rule.identifier.startswith(tuple(wanted))) and not rule.identifier.startswith(tuple(unwanted))
    )


def named(identifier: str) -> Rule:
    """One rule. Raises DoctorError where there is none of that name."""
    for rule in all_rules():
        if rule.identifier == identifier.upper():
            return rule
    raise _no_rule(identifier)


def as_patched(environment: Mapping[str, str] = os.environ) -> settings.Settings:
    """The settings that a job with nemo_patches would have in this environment. Raises DoctorError."""
    try:
        return settings.resolve(environment=environment)
    except settings.SettingsError as error:
        raise DoctorError(str(error)) from None


def examine(
    path: Path, overrides: Sequence[str], rules: Sequence[Rule], patched: settings.Settings | None = None
) -> Report:
    """Read one config and check every rule on it. Never raises for what is in the config."""
    try:
        config = reading.load(path, overrides)
    except ConfigError as error:
        return Report(str(path), "", (), str(error))
    job = Job(config, patched)
    return Report(str(path), job.headline, checked(job, rules), config=config)


def examine_machine(rules: Sequence[Rule]) -> Report:
    """Check every rule on this machine and its Python environment."""
    facts = machine.gather()
    return Report(facts.host, facts.headline, checked(facts, rules, "machine"))


def checked(subject: object, rules: Sequence[Rule], about: str = "config") -> tuple[Found, ...]:
    """What the rules about a Job, a Machine ("machine") or Ranks ("ranks") find in it, worst first.

    A rule that fails is found by NP001.
    """
    found = [one for rule in rules if rule.about == about for one in _checked(rule, subject)]
    found.sort(key=lambda one: (-one.finding.severity, one.rule.identifier, one.finding.line or 0))
    return tuple(found)


def _checked(rule: Rule, subject: object) -> list[Found]:
    try:
        return [Found(rule, finding) for finding in rule.check(subject)]
    except Exception as error:  # one rule's fault must not hide what the others find
        what = f"{rule.identifier} failed: {type(error).__name__}: {error}"
        return [Found(named(CRASHED), Finding(Severity.WARNING, what, (), "a report of this, with what was examined"))]


def _no_rule(identifier: str) -> DoctorError:
    known = ", ".join(rule.identifier for rule in all_rules())
    return DoctorError(f"no rule {identifier!r}; allowed: {known}; to select or ignore, also how some of them begin")


def _identifiers(given: Sequence[str]) -> list[str]:
    return [part.upper() for text in given for part in re.split(r"[,\s]+", text) if part]
