"""One run of the doctor:
choose the rules, check them on a config, a machine or ranks, and sort the findings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_patches.tools.doctor import code
from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.config import Config
from nemo_patches.tools.doctor.finding import NOTE, Rule, RuleFinding, warning
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.rules import all_rules

CRASHED = "NP001"
Pair = tuple[Rule, RuleFinding]


@dataclass(frozen=True)
class Examination:
    """The findings in one config, on this machine or between ranks, worst first; or why it cannot
    be read.

    headline: one line on what the rules went by. lines: printed before the findings. config: None
    where none was read.
    details: for programs.
    unchecked: the rules that need a NeMo that is not here.
    """

    name: str
    headline: str = ""
    findings: tuple[Pair, ...] = ()
    error: str = ""
    config: Config | None = None
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: nothing but notes; 1: findings; 2: it cannot be read."""
        if self.error:
            return 2
        return 1 if any(finding.severity > NOTE for _, finding in self.findings) else 0


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's arguments as configs and overrides: an argument with a = or a leading ~ is an
    override.
    """
    overrides = [
        text
        for text in arguments
        if text.startswith("~") or ("=" in text and not os.path.exists(text))
    ]
    return [text for text in arguments if text not in overrides], overrides


def chosen(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """The rules whose identifiers begin with one of `select` (none: all) and with none of `ignore`.

    Raises DoctorError for one that no rule's identifier begins with.
    """
    rules = all_rules()
    wanted = _beginnings(select, rules) or ("",)
    unwanted = _beginnings(ignore, rules)
    return tuple(
        rule
        for rule in rules
        if rule.identifier.startswith(wanted)
        and not rule.identifier.startswith(unwanted)
    )


def _beginnings(given: Sequence[str], rules: Sequence[Rule]) -> tuple[str, ...]:
    names = " ".join(given).replace(",", " ").upper().split()
    for name in names:
        if not any(rule.identifier.startswith(name) for rule in rules):
            raise _no_rule(name)
    return tuple(names)


def named(identifier: str) -> Rule:
    for rule in all_rules():
        if rule.identifier == identifier.upper():
            return rule
    raise _no_rule(identifier)


def _no_rule(identifier: str) -> DoctorError:
    known = ", ".join(rule.identifier for rule in all_rules())
    return DoctorError(
        f"no rule {identifier!r}; allowed: {known}. To select or ignore, also how some"
        " of them begin, such as NP4."
    )


def examine(
    path: Path,
    overrides: Sequence[str],
    rules: Sequence[Rule],
) -> Examination:
    """Read one config, or a model's code, and check every rule on it. Never raises for what is in
    it.
    """
    try:
        if path.suffix == ".py":
            return examine_code(path, rules)
        config = reading.load(path, overrides)
        job = Job(config)
        return Examination(str(path), job.headline, checked(job, rules), config=config)
    except DoctorError as error:
        return Examination(str(path), error=str(error))
    except ModuleNotFoundError:  # what to install is said where the command begins
        raise
    except Exception as error:  # one file's fault hides not what others have
        said = f"{path}: the doctor failed on it: {type(error).__name__}: {error}"
        return Examination(str(path), error=f"{said}; please report it, with the file")


def examine_code(path: Path, rules: Sequence[Rule]) -> Examination:
    """Check every rule on a model's own code, which is not run."""
    try:
        found = code.read(path)
    except DoctorError as error:
        return Examination(str(path), error=str(error))
    of_nemo = [rule.identifier for rule in rules if rule.needs_nemo]
    return Examination(
        str(path),
        found.headline,
        checked(found, rules, "code"),
        unchecked=() if found.nemo else tuple(of_nemo),
    )


def examine_machine(rules: Sequence[Rule]) -> Examination:
    """Check every rule on this machine's variables of NCCL and torch."""
    from nemo_patches.tools.doctor import machine  # which a config does not need

    facts = machine.gather()
    return Examination(facts.host, facts.headline, checked(facts, rules, "machine"))


def checked(
    subject: object, rules: Sequence[Rule], about: str = "config"
) -> tuple[Pair, ...]:
    """The findings of the rules about a Job ("config"), a Code, a Machine or Ranks, worst first.

    A rule that raises becomes a finding of NP001.
    """
    found: list[Pair] = []
    for rule in rules:
        if rule.about != about:
            continue
        try:
            found += [(rule, finding) for finding in rule.check(subject)]
        except Exception as error:  # one rule's fault hides not what others find
            what = f"{rule.identifier} failed: {type(error).__name__}: {error}"
            instead = "a report of this, with what was examined"
            found.append((named(CRASHED), warning(what, (), instead)))
    return tuple(
        sorted(
            found,
            key=lambda pair: (-pair[1].severity, pair[0].identifier, pair[1].line or 0),
        )
    )
