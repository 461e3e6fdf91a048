"""Carry out `nemo-patches doctor`: check its arguments, examine, print, and return the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import NoReturn

from rich.console import Console

from nemo_patches.tools.doctor import examination, fixes, report
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.examination import Report
from nemo_patches.tools.doctor.finding import Rule
from nemo_patches.tools.doctor.yaml_text import ConfigError


@dataclass(frozen=True)
class Request:
    """The command's arguments and options, as they were given."""

    arguments: tuple[str, ...] = ()
    patched: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    json: bool = False
    fix: bool = False
    write: bool = False
    list_rules: bool = False
    explain: str | None = None
    ranks: bool = False


def carry_out(request: Request) -> int:
    """Print what was asked for, errors on stderr, and return the exit code."""
    try:
        return _carry_out(request)
    except (DoctorError, ConfigError) as error:
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
    paths, overrides = examination.split(request.arguments)
    if not paths and (overrides or request.patched or request.fix or request.write):
        raise DoctorError(
            "no config; expected at least one file, as in: nemo-patches doctor my_config.yaml trainer.devices=8"
        )
    if request.ranks and (paths or overrides or request.patched or request.fix):
        raise DoctorError("found --ranks with a config, an override, --patched or --fix; allowed is --ranks alone")
    if request.write and not request.fix:
        raise DoctorError("--write without --fix; --fix prints the changes that it would write")
    if request.json and request.fix:
        raise DoctorError("found --json and --fix; allowed is one of them")
    if request.ranks:
        _of_ranks(rules, request)
    if paths:
        patched = examination.as_patched() if request.patched else None
        reports = [examination.examine(path, overrides, rules, patched) for path in paths]
    else:
        reports = [examination.examine_machine(rules)]
    _print(reports, request)
    return max(each.exit_code for each in reports)


def _of_ranks(rules: tuple[Rule, ...], request: Request) -> NoReturn:
    """Only rank 0 prints, and has an exit code: the launcher would end its job for any other's."""
    from nemo_patches.tools.doctor import ranks

    here, code = ranks.place(), 0
    try:
        job_ranks = ranks.examine(here)
        if job_ranks is not None:
            ranks_report = Report(
                f"{here.size} ranks",
                job_ranks.headline,
                examination.checked(job_ranks, rules, "ranks"),
                lines=tuple(job_ranks.lines()),
                details=job_ranks.as_json(),
            )
            _print([ranks_report], request)
            code = ranks_report.exit_code
    except DoctorError as error:
        _complain(str(error))
        code = 0 if here.rank else 2
    ranks.leave(code)


def _print(reports: Sequence[Report], request: Request) -> None:
    for unreadable in (each for each in reports if each.error):
        _complain(unreadable.error)
    if request.json:
        print(dumps([report.as_json(each) for each in reports], indent=2, default=str))
    elif request.fix:
        for each in reports:
            _fix(each, request.write)
    else:
        console = Console()
        for each in reports:
            report.show(each, console)


def _fix(each: Report, write: bool) -> None:
    if each.config is None:
        return
    changes = [finding.change for _, finding in each.findings if finding.change is not None]
    path, before = each.config.source.path, each.config.source.text
    after, refused = fixes.fixed(each.config, changes)
    sys.stdout.write(fixes.diff(path, before, after))
    for reason in refused:
        _complain(f"{path}: not changed: {reason}")
    if after == before:
        _complain(f"{path}: no safe change to make")
    elif write:
        fixes.write(path, before, after)
        _complain(f"{path}: written")


def _complain(text: str) -> None:
    print(report.printable(f"nemo-patches doctor: {text}"), file=sys.stderr)
