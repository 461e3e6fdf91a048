"""The command `nemo-patches diagnose`: read, diagnose, print, and write the page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from nemo_patches.text import safe
from nemo_patches.tools import counted
from nemo_patches.tools.console import terminal
from nemo_patches.tools.diagnose import reading, running
from nemo_patches.tools.diagnose.collect.host_jobs import (
    NothingToLookAtError,
    jobs_here,
    pids_in,
)
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.live import NoSocketError, ask_job
from nemo_patches.tools.diagnose.rank_facts import (
    Evidence,
    ProcessRank,
    UnreadableError,
)
from nemo_patches.tools.diagnose.report_text import show

JSON_FORMAT = 3  # docs/diagnose.md describes it
_WIDTH = 160  # columns, where the output is not a terminal
_NARROWEST = 80  # columns, of a table that can be read
_LONG_BYTES = 32_000_000  # some seconds' reading
_LONGEST_TEXT = 4000  # characters of anything that is printed

Judged: TypeAlias = tuple[Diagnosis, Evidence]  # a report, and what it is from


class DiagnoseError(Exception):
    """The command cannot do what was asked. The text says why."""


def run(
    paths: list[Path],
    *,
    json: bool,
    html: Path | None = None,
    job: str | None = None,
    pids: str = "",
) -> int:
    """Print the report, write it as a page if one is asked for, and return the exit code. Raises
    DiagnoseError.
    """
    if sum(map(bool, (paths, job is not None, pids))) > 1:
        raise DiagnoseError(
            "give files and folders, or --job DIR, or --pids: one of them, or none"
        )
    if html is not None:
        _refuse_unwritable(html)
    try:
        judged, count = _of_files(paths) if paths else _ask(job, pids)
        if html is not None:
            judged = list(judged)
            _write(html, judged)
        return _print_all((report for report, _ in judged), json, count)
    except (UnreadableError, NothingToLookAtError) as error:
        raise DiagnoseError(safe(str(error))) from error
    except BrokenPipeError:  # cli.py has the answer
        raise
    except OSError as error:
        raise DiagnoseError(
            f"{safe(str(error.filename or ''))}: {error.strerror or error}"
        ) from error
    except KeyboardInterrupt:
        return 130


def _of_files(paths: list[Path]) -> tuple[Iterable[Judged], int]:
    found = reading.find(paths)
    _say_size(found)
    evidence = reading.joined(reading.read(found), found.problems, found.earlier)
    jobs = {", ".join(safe(str(path)) for path in paths[:4]): evidence}
    for name, facts in evidence.other_jobs.items():
        sizes = (f.value.world_size for f in facts if isinstance(f.value, ProcessRank))
        jobs[f"job {name}"] = Evidence(facts, world_size=max(sizes, default=0))
    judged = [(judge(of, name), of) for name, of in jobs.items()]
    return judged, len(judged)


def _say_size(found: reading.FoundFiles) -> None:
    """On a terminal, before what takes seconds."""
    files = {file for files in found.by_reader.values() for file in files}
    with contextlib.suppress(OSError):  # the readers say what cannot be read
        size = sum(file.stat().st_size for file in files)
        if size >= _LONG_BYTES and sys.stderr is not None and sys.stderr.isatty():
            some = counted(len(files), "file")
            print(f"reading {size / 1e6:.0f} MB in {some} ...", file=sys.stderr)


def _ask(job: str | None, pids: str) -> tuple[Iterable[Judged], int]:
    """Diagnose a running job: through its sockets (--job), or its processes on this host."""
    try:
        if job is not None:
            return [ask_job(Path(job))], 1
        jobs = jobs_here(pids=pids_in(pids))
    except NoSocketError as error:
        try:
            jobs = jobs_here(job or "")
        except NothingToLookAtError:
            raise error from None
    return map(_judged, jobs), len(jobs)


def _judged(ranks: list[HostRank]) -> Judged:
    name, evidence = running.evidence_of(ranks)
    return judge(evidence, name), evidence


def _print_all(reports: Iterable[Diagnosis], json: bool, count: int) -> int:
    """Of several jobs: as JSON one a line. The exit code of a job with a finding counts first."""
    codes = set()
    for one in reports:
        report = _printable(one)
        codes.add(report.exit_code)
        if json:
            content = {"format": JSON_FORMAT, **asdict(report)}
            content["exit_code"] = report.exit_code
            print(dumps(content, indent=None if count > 1 else 2))
            continue
        if count > 1:
            print(f"--- {report.folder}")
        # A terminal without a size may have COLUMNS=0, for which rich prints nothing.
        is_terminal = sys.stdout.isatty()
        width = max(Console().width, _NARROWEST) if is_terminal else _WIDTH
        show(report, terminal(width))
    return 1 if 1 in codes else max(codes)


def _refuse_unwritable(file: Path) -> None:
    """Before a look that takes a minute."""
    if not os.access(file if os.path.exists(file) else file.parent, os.W_OK):
        why = "it, or its folder, is not there or may not be written to"
        raise DiagnoseError(f"--html={safe(str(file))}: {why}")


def _write(file: Path, judged: Iterable[Judged]) -> None:
    from nemo_patches.tools.diagnose.page import page
    from nemo_patches.tools.diagnose.page_content import content_of

    text = page(
        [content_of(_printable(report), evidence) for report, evidence in judged]
    )
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        why = f"{error.strerror or error}; a file that can be written is wanted"
        raise DiagnoseError(f"--html={safe(str(file))}: {why}") from error


def error_as_json(error: DiagnoseError) -> str:
    """On standard output, where a program that asked for JSON looks."""
    return dumps({"format": JSON_FORMAT, "error": str(error), "exit_code": 2})


def _printable(content: Any) -> Any:
    """Bound and escape every text of a report: texts come from files, and may hold control
    characters.
    """
    if isinstance(content, str):
        return safe(content, _LONGEST_TEXT)
    if isinstance(content, tuple):
        return tuple(map(_printable, content))
    if is_dataclass(content) and not isinstance(content, type):
        told = {name: _printable(one) for name, one in vars(content).items()}
        return replace(content, **told)
    return content
