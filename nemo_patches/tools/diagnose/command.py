"""The command `nemo-patches diagnose`: read, diagnose, print, and draw what is asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_patches.text import safe
from nemo_patches.tools.diagnose import reading, running
from nemo_patches.tools.diagnose.collect.host_jobs import (
    STUCK_AFTER_S,
    NothingToLookAtError,
    jobs_here,
    pids_in,
)
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.folder import TracedJob, UnreadableError
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.live import NoSocketError, diagnose_job
from nemo_patches.tools.diagnose.report_text import show
from nemo_patches.tools.diagnose.sources import nccl_ras, stall_reports
from nemo_patches.tools.diagnose.watch import follow, once

JSON_FORMAT = 2  # docs/diagnose.md describes it
_WIDTH = 160  # columns, where the output is not a terminal
_NARROWEST = 80  # columns, of a table that can be read
_LONGEST_TEXT = 4000  # characters of anything that is printed


class DiagnoseError(Exception):
    """The command cannot do what was asked. The text says why."""


def run(
    paths: list[Path],
    json: bool,
    watch: bool,
    plot: Path | None,
    perfetto: Path | None,
    launch: int | None = None,
    job: str | None = None,
    ras: str | None = None,
    pids: str = "",
) -> int:
    """Print the report, write the pictures that are asked for, and return the exit code. Raises DiagnoseError."""
    if (len(paths) > 0) + (job is not None) + (ras is not None) + bool(pids) > 1:
        raise DiagnoseError("give files and folders, or --job DIR, or --ras HOST, or --pids: one of them, or none")
    is_of_files = bool(paths)
    if not is_of_files and (watch or plot or perfetto or launch is not None):
        raise DiagnoseError("--watch, --plot, --perfetto and --launch need a folder of traces")
    try:
        if not is_of_files:
            return _ask(job, ras, pids, json)
        return _of_files(paths, json, watch, plot, perfetto, launch)
    except (UnreadableError, NothingToLookAtError) as error:
        raise DiagnoseError(safe(str(error))) from error
    except OSError as error:
        raise DiagnoseError(f"{safe(str(error.filename or ''))}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        return 130


def _of_files(
    paths: list[Path], json: bool, watch: bool, plot: Path | None, perfetto: Path | None, launch: int | None
) -> int:
    if watch and (plot or perfetto):
        raise DiagnoseError("--watch with --plot or --perfetto: give only one of them")
    if watch and len(paths) == 1 and os.path.isdir(paths[0]):  # also where no trace has come yet
        return _watch(paths[0], json, launch)
    where = safe(str(paths[0]))
    are_folders = all(map(os.path.isdir, paths))  # Path's own raises for a name that is too long
    found = reading.find(paths) if are_folders or not (watch or plot or perfetto) else reading.Found()
    if not found.traces and (watch or plot or perfetto):
        raise DiagnoseError(f"{where} is no folder of traces: --watch, --plot and --perfetto need one")
    if not found.traces and launch is not None:
        raise DiagnoseError(f"--launch={launch}: only of a folder of traces; of logs give the folder attempt_{launch}")
    jobs = [once(folder, launch=launch) for folder in found.traces]
    for read, report in jobs[:1]:
        _draw(read, report, plot, perfetto)
    others = reading.read(found)
    if len(jobs) == 1 and not any(part.facts or part.findings for _, part in others):
        report = jobs[0][1]
    else:
        parts = [*others, *(("traces", reading.of_traces(each)) for each, _ in jobs)]
        evidence = reading.joined(parts, found.problems, found.earlier)
        source = ", ".join(safe(str(path)) for path in paths[:4])
        # A rank that reports a stall has waited for stall_timeout.
        stuck_after_s = 0.0 if stall_reports.KIND in found.by_reader else STUCK_AFTER_S
        report = judge(evidence, source, stuck_after_s)
    return _print(report, json)


def _ask(job: str | None, ras: str | None, pids: str, json: bool) -> int:
    """Diagnose a running job: through its sockets (--job), NCCL's RAS (--ras), or its processes on this host."""
    if ras is not None:
        evidence = Evidence()
        nccl_ras.ask(ras, evidence)
        return _print(judge(evidence, safe(ras)), json)
    try:
        if job is not None:
            return _print(diagnose_job(Path(job)), json)
        jobs = jobs_here(pids=pids_in(pids))
    except NoSocketError as error:
        try:
            jobs = jobs_here(job or "")
        except NothingToLookAtError:
            raise error from None
    codes = set()
    for ranks in jobs:
        report = running.diagnose(ranks)
        if len(jobs) > 1 and not json:
            print(f"--- {report.folder}")
        codes.add(_print(report, json, one_line=len(jobs) > 1))
    return 1 if 1 in codes else max(codes)


def _watch(path: Path, json: bool, launch: int | None) -> int:
    code = 2
    try:
        for _, report in follow(path, launch=launch):
            with _ctrl_c_afterwards():
                if not json:
                    print(f"--- {time.strftime('%H:%M:%S')}")
                code = _print(report, json, one_line=True)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return code


@contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Delay Ctrl-C: raised in a destructor or a weak reference's callback, which printing may run, it would be lost."""
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _print(report: Diagnosis, json: bool, one_line: bool = False) -> int:
    """Return the exit code."""
    report = _printable(report)
    if json:
        content = {"format": JSON_FORMAT, **asdict(report), "exit_code": report.exit_code}
        print(dumps(content, indent=None if one_line else 2))
    else:
        # A terminal without a size may have COLUMNS=0, for which rich prints nothing.
        show(report, Console(width=max(Console().width, _NARROWEST) if sys.stdout.isatty() else _WIDTH))
    return report.exit_code


def error_as_json(error: DiagnoseError) -> str:
    """On standard output, where a program that asked for JSON looks."""
    return dumps({"format": JSON_FORMAT, "error": str(error), "exit_code": 2})


def _printable(content: Any) -> Any:
    """Bound and escape every text of a report: texts come from files, and may hold control characters."""
    if isinstance(content, str):
        return safe(content, _LONGEST_TEXT)
    if isinstance(content, tuple):
        return tuple(map(_printable, content))
    if is_dataclass(content) and not isinstance(content, type):
        return replace(content, **{field.name: _printable(getattr(content, field.name)) for field in fields(content)})
    return content


def _draw(job: TracedJob, report: Diagnosis, plot: Path | None, perfetto: Path | None) -> None:
    if plot is not None:
        try:
            from nemo_patches.tools.diagnose.plot import draw
        except ImportError as error:
            raise DiagnoseError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
        with _writing("--plot", plot):
            draw(job, plot, _printable(report))
    if perfetto is not None:
        from nemo_patches.tools.diagnose.perfetto import write

        with _writing("--perfetto", perfetto):
            write(job, perfetto)


@contextmanager
def _writing(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = safe(str(file))
        raise DiagnoseError(
            f"{option}={where}: {error.strerror or error}; a file that can be written is wanted"
        ) from error
