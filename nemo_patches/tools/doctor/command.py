"""Carry out `nemo-patches doctor`:
check its arguments, examine, print, and return the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from nemo_patches.tools.doctor import (
    against,
    examination,
    fixes,
    formats,
    loaders,
    report,
)
from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.finding import Rule, Severity
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.request import FORMATS, SEVERITIES, Request


def carry_out(request: Request) -> int:
    """Print what was asked for, errors on stderr, and return the exit code."""
    try:
        code = _carry_out(request)
        return 0 if request.exit_zero and code == 1 else code
    except DoctorError as error:
        _complain(str(error))
        return 2


def _carry_out(request: Request) -> int:
    rules = examination.chosen(request.select, request.ignore)
    if request.list_rules:
        print(report.listing(rules))
        return 0
    if request.explain is not None:
        print(report.explanation(examination.named(request.explain)))
        return 0
    severity = _one_of("--severity", request.severity, SEVERITIES)
    _one_of("--output-format", request.output_format, FORMATS)
    configs, overrides = examination.split(request.arguments)
    paths = list(map(Path, configs))
    _refuse(request, paths, overrides)
    run = _Run(request=request, rules=rules, paths=paths, overrides=overrides)
    if request.ranks:
        run.of_ranks()
    reports = [_from(each, severity) for each in run.reports()]
    _print(reports, request, rules)
    return max(each.exit_code for each in reports)


def _refuse(request: Request, paths: Sequence[Path], overrides: Sequence[str]) -> None:
    if not paths and (overrides or request.fix or request.against):
        raise DoctorError(
            "no config; expected at least one file, as in: nemo-patches doctor"
            " my_config.yaml trainer.devices=8"
        )
    if request.ranks and (len(paths) > 1 or request.fix or request.against):
        raise DoctorError(
            "found --ranks with several configs, --fix or --against;"
            " allowed: one config"
        )
    if request.json and request.output_format is not None:
        raise DoctorError(
            f"found --json and --output-format {request.output_format}; allowed is one"
            " of them"
        )
    if request.fix and (request.json or request.output_format not in (None, "text")):
        raise DoctorError(
            f"found --{'json' if request.json else 'output-format'} and --fix; allowed"
            " is one of them"
        )


@dataclass(frozen=True)
class _Run:
    """What one command examines, and with which rules."""

    request: Request
    rules: tuple[Rule, ...]
    paths: Sequence[Path]
    overrides: Sequence[str]

    def reports(self) -> list[Examination]:
        if not self.paths:
            return [examination.examine_machine(self.rules)]
        reports = [
            (
                examination.examine_code(path, self.rules)
                if path.suffix == ".py"
                else examination.examine(path, self.overrides, self.rules)
            )
            for path in self.paths
        ]
        if self.request.against is not None:
            other = against.reference(self.request.against)
            reports = [_compared(each, self.request.against, other) for each in reports]
        return reports

    def of_ranks(self) -> NoReturn:
        """Only rank 0 prints, and has an exit code: the launcher would end its job for any
        other's.
        """
        from nemo_patches.tools.doctor import exchange, rank_place

        here = rank_place.place()
        code = 0
        try:
            job_ranks = exchange.examine(here, self._loaders(here.size))
            if job_ranks is not None:
                ranks_report = Examination(
                    f"{here.size} ranks",
                    job_ranks.headline,
                    examination.checked(job_ranks, self.rules, "ranks"),
                    lines=tuple(job_ranks.lines()),
                    details=job_ranks.as_json(),
                )
                _print([ranks_report], self.request, self.rules)
                code = ranks_report.exit_code
        except DoctorError as error:
            _complain(str(error))
            code = 0 if here.rank else 2
        exchange.leave(code)

    def _loaders(self, ranks: int) -> dict[str, str]:
        """What the config makes of this rank's data loaders; why it cannot be read is told to rank
        0 like a setting.
        """
        found: dict[str, str] = {}
        try:
            for path in self.paths:
                found |= loaders.settings(
                    Job(reading.load(path, self.overrides)), ranks
                )
        except DoctorError as error:
            return {"the config": str(error)}
        return found


def _compared(each: Examination, name: str, other: Mapping[str, Any]) -> Examination:
    """Add how a config differs from another one, printed before the findings."""
    if each.config is None:
        return each
    found = list(against.differences(each.config, other))
    lines = [
        f"{each.name}: {len(found)} settings that matter differ from {name}",
        *(f"    {one}" for one in found),
    ]
    details = [
        {"key": one.own.key, "value": report.plain(one.own.value), "there": one.other}
        for one in found
    ]
    return replace(
        each, lines=tuple(lines), details={"against": name, "differences": details}
    )


def _one_of(option: str, given: str | None, allowed: Sequence[str]) -> str | None:
    if given is not None and given not in allowed:
        raise DoctorError(
            f"{option} {given!r} is not allowed; allowed: {', '.join(allowed)}"
        )
    return given


def _from(each: Examination, severity: str | None) -> Examination:
    """Drop the findings below a severity; they do not count for the exit code, either."""
    if severity is None:
        return each
    return replace(
        each,
        findings=tuple(
            pair
            for pair in each.findings
            if pair[1].severity >= Severity[severity.upper()]
        ),
    )


def _print(
    reports: Sequence[Examination], request: Request, rules: Sequence[Rule]
) -> None:
    """Print the reports in the format asked for."""
    for unreadable in (each for each in reports if each.error):
        _complain(unreadable.error)
    if request.json:
        print(dumps([report.as_json(each) for each in reports], indent=2, default=str))
    elif request.output_format == "sarif":
        print(dumps(formats.sarif(reports, rules), indent=2))
    elif request.output_format == "github":
        for line in formats.github(reports):
            print(report.printable(line))
    elif request.fix:
        for each in reports:
            _fix(each)
    else:
        # No line is wrapped, so any width will do but that of COLUMNS=0, for which rich prints
        # nothing.
        console = Console(width=80)
        report.show(reports, console, quiet=request.quiet)


def _fix(each: Examination) -> None:
    """Print the safe changes as a diff."""
    if each.config is None:
        return
    changes = [
        finding.change for _, finding in each.findings if finding.change is not None
    ]
    path = each.config.source.path
    before = each.config.source.text
    after, refused = fixes.fixed(each.config, changes)
    # Bytes: to be applied.
    typer.echo(
        fixes.diff(path, before, after).encode(errors="surrogateescape"), nl=False
    )
    for reason in refused:
        _complain(f"{path}: not changed: {reason}")
    if after == before:
        _complain(f"{path}: no safe change to make")


def _complain(text: str) -> None:
    print(report.printable(f"nemo-patches doctor: {text}"), file=sys.stderr)
