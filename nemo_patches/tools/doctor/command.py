"""Carry out `nemo-patches doctor`:
check its arguments, examine, print, and return the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import NoReturn

import typer

from nemo_patches.tools.console import terminal
from nemo_patches.tools.doctor import (
    against,
    examination,
    fixes,
    formats,
    loaders,
    report,
)
from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.finding import Rule, Severity
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.request import FORMATS, SEVERITIES, Request


def carry_out(request: Request) -> int:
    """Print what was asked for, errors on stderr, and return the exit code."""
    try:
        code = _carry_out(request)
    except DoctorError as error:
        _complain(str(error))
        return 2
    return 0 if request.exit_zero and code == 1 else code


def _carry_out(request: Request) -> int:
    rules = examination.chosen(request.select or (), request.ignore or ())
    if request.list_rules:
        print(report.listing(rules))
        return 0
    if request.explain is not None:
        print(report.explanation(examination.named(request.explain)))
        return 0
    configs, overrides = examination.split(request.arguments or ())
    paths = list(map(Path, configs))
    _refuse(request, paths, overrides)
    if request.ranks:
        _compare_ranks(request, rules, paths, overrides)
    reports = [examination.examine(path, overrides, rules) for path in paths] or [
        examination.examine_machine(rules)
    ]
    if request.against is not None:
        other = against.reference(request.against)
        reports = [
            against.compared(each, name=request.against, other=other)
            for each in reports
        ]
    return _printed(reports, request, rules)


def _refuse(request: Request, paths: Sequence[Path], overrides: Sequence[str]) -> None:
    for option, given, allowed in (
        ("--severity", request.severity, SEVERITIES),
        ("--output-format", request.output_format, FORMATS),
    ):
        if given is not None and given not in allowed:
            raise DoctorError(
                f"{option} {given!r} is not allowed; allowed: {', '.join(allowed)}"
            )
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
    forms = {
        "--json": request.json,
        "--output-format": request.output_format not in (None, "text"),
        "--fix": request.fix,
    }
    given_forms = [option for option, given in forms.items() if given]
    if len(given_forms) > 1:
        raise DoctorError(f"found {' and '.join(given_forms)}; allowed is one of them")


def _compare_ranks(
    request: Request,
    rules: Sequence[Rule],
    paths: Sequence[Path],
    overrides: Sequence[str],
) -> NoReturn:
    """Only rank 0 prints, and has an exit code: the launcher would end its job for any other's."""
    from nemo_patches.tools.doctor import rank_place, ranks_facts

    here = rank_place.place()
    own: dict[str, str] = {}
    try:
        for path in paths:
            own = loaders.settings(Job(reading.load(path, overrides)), here.size)
    except DoctorError as error:
        own = {"the config": str(error)}  # told to rank 0 like a setting
    code = 0
    try:
        ranks = ranks_facts.examine(here, own)
        if ranks is not None:
            found = Examination(
                f"{here.size} ranks",
                ranks.headline,
                examination.checked(ranks, rules, "ranks"),
                lines=tuple(ranks.lines()),
                details=ranks.as_json(),
            )
            code = _printed([found], request, rules)
    except DoctorError as error:
        _complain(str(error))
        code = 0 if here.rank else 2
    ranks_facts.leave(code)


def _printed(
    examined: Sequence[Examination], request: Request, rules: Sequence[Rule]
) -> int:
    """Print the reports in the format asked for, without the findings below a severity, which do
    not count for the exit code, either; return that.
    """
    lowest = Severity[(request.severity or "note").upper()]
    reports = [
        replace(
            each,
            findings=tuple(
                pair for pair in each.findings if pair[1].severity >= lowest
            ),
        )
        for each in examined
    ]
    for each in reports:
        if each.error:
            _complain(each.error)
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
        report.show(reports, terminal(80), quiet=request.quiet)
    return max(each.exit_code for each in reports)


def _fix(each: Examination) -> None:
    """Print the safe changes as a diff."""
    if each.config is None:
        return
    changes = [
        finding.change for _, finding in each.findings if finding.change is not None
    ]
    source = each.config.source
    after, refused = fixes.fixed(each.config, changes)
    # Bytes: to be applied.
    diff = fixes.diff(source.path, source.text, after)
    typer.echo(diff.encode(errors="surrogateescape"), nl=False)
    for reason in refused:
        _complain(f"{source.path}: not changed: {reason}")
    if not diff:
        _complain(f"{source.path}: no safe change to make")


def _complain(text: str) -> None:
    print(report.printable(f"nemo-patches doctor: {text}"), file=sys.stderr)
