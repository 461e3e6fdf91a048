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

from nemo_patches.channel.safe_text import safe
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.findings import Report
from nemo_patches.tools.diagnose.flight_recorder import diagnose_dumps, is_dump
from nemo_patches.tools.diagnose.folder import Job, UnreadableError
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.live import diagnose_job
from nemo_patches.tools.diagnose.nccl_ras import diagnose_ras, diagnose_saved, is_ras
from nemo_patches.tools.diagnose.report_text import show
from nemo_patches.tools.diagnose.sources import logs
from nemo_patches.tools.diagnose.watch import follow, once

JSON_FORMAT = 1  # docs/diagnose.md describes it
_WIDTH = 160  # columns, where the output is not a terminal
_NARROWEST = 80  # columns, of a table that can be read
_MOST_LOOKED_AT = 1000  # files, for what kind they are
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
) -> int:
    """Print the report, write the pictures that are asked for, and return the exit code. Raises DiagnoseError."""
    if (len(paths) > 0) + (job is not None) + (ras is not None) != 1:
        raise DiagnoseError("give a folder or logs, or --job and its folder, or --ras HOST or a file; one of them")
    if job is not None or ras is not None:
        if watch or plot or perfetto or launch is not None:
            raise DiagnoseError("--job and --ras take only --json beside them")
        return _ask(job, ras or "", json)
    path = paths[0]
    is_traces = len(paths) == 1 and os.path.isdir(path) and (watch or plot is not None or not _has_logs_only(path))
    if not is_traces and (watch or plot or perfetto):
        raise DiagnoseError(f"{safe(str(path))} is no folder of traces: --watch, --plot and --perfetto need one")
    if not is_traces and launch is not None:
        raise DiagnoseError(f"--launch={launch}: only of a folder of traces; of logs give the folder attempt_{launch}")
    if watch and (plot or perfetto):
        raise DiagnoseError("--watch with --plot or --perfetto: give only one of them")
    try:
        if watch:
            return _watch(path, json, launch)
        if not is_traces:
            is_dumps = _has_dumps(path)
            is_answer = not is_dumps and len(paths) == 1 and os.path.isfile(path) and is_ras(path)
            report = diagnose_dumps(path) if is_dumps else diagnose_saved(path) if is_answer else _of_logs(paths)
        else:
            read, report = once(path, launch=launch)
            _draw(read, report, plot, perfetto)
    except UnreadableError as error:
        raise DiagnoseError(safe(str(error))) from error
    except OSError as error:
        raise DiagnoseError(f"{safe(str(path))}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        return 130
    _print(report, json)
    return report.exit_code


def _of_logs(paths: list[Path]) -> Report:
    evidence = Evidence()
    logs.read(paths, evidence)
    return judge(evidence, ", ".join(safe(str(path)) for path in paths[:4]))


def _ask(job: str | None, ras: str, json: bool) -> int:
    try:
        report = diagnose_ras(ras) if job is None else diagnose_job(Path(job))
    except UnreadableError as error:
        raise DiagnoseError(safe(str(error))) from error
    _print(report, json)
    return report.exit_code


def _has_logs_only(folder: Path) -> bool:
    """Whether a folder, as torchrun's --log-dir is, has files, or files in folders, and none of a trace."""
    try:
        inside = list(folder.iterdir())
    except OSError:
        return False
    return bool(inside) and not any(file.suffix == ".jsonl" for file in inside)


def _has_dumps(path: Path) -> bool:
    """Whether a file, or one of those in a folder, is a dump of torch's Flight Recorder."""
    # What is read from a pipe (`diagnose <(COMMAND)`) is gone.
    files = sorted(path.iterdir())[:_MOST_LOOKED_AT] if os.path.isdir(path) else [path]
    return any(os.path.isfile(file) and is_dump(file) for file in files)


def _watch(path: Path, json: bool, launch: int | None) -> int:
    code = 2
    try:
        for _, report in follow(path, launch=launch):
            code = report.exit_code
            with _ctrl_c_afterwards():
                if not json:
                    print(f"--- {time.strftime('%H:%M:%S')}")
                _print(report, json, one_line=True)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return code


@contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Keep Ctrl-C until the end: in a destructor or a weak reference's callback, and printing runs some, it is lost."""
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _print(report: Report, json: bool, one_line: bool = False) -> None:
    report = _printable(report)
    if json:
        content = {"format": JSON_FORMAT, **asdict(report), "exit_code": report.exit_code}
        print(dumps(content, indent=None if one_line else 2))
    else:
        # Of a terminal without a size COLUMNS may be 0, for which rich prints nothing.
        show(report, Console(width=max(Console().width, _NARROWEST) if sys.stdout.isatty() else _WIDTH))


def error_as_json(error: DiagnoseError) -> str:
    """On standard output, where a program that asked for JSON looks."""
    return dumps({"format": JSON_FORMAT, "error": str(error), "exit_code": 2})


def _printable(content: Any) -> Any:
    """The report, or a part of it, with no text that is too long, or could steer a terminal: files may say anything."""
    if isinstance(content, str):
        return safe(content, _LONGEST_TEXT)
    if isinstance(content, tuple):
        return tuple(map(_printable, content))
    if is_dataclass(content) and not isinstance(content, type):
        return replace(content, **{field.name: _printable(getattr(content, field.name)) for field in fields(content)})
    return content


def _draw(job: Job, report: Report, plot: Path | None, perfetto: Path | None) -> None:
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
