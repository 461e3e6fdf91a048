"""The demo's own process: makes the data, starts one process per rank, ends those that hang, and prints the comparison.

It imports neither torch nor NeMo; what a rank does is in rank.py, and in what that imports.
"""

from __future__ import annotations

import io
import os
import re
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from nemo_patches.patching.settings import refusals
from nemo_patches.tools.demo import data, processes, report
from nemo_patches.tools.demo.errors import DemoError
from nemo_patches.tools.demo.jobs import Task

_PICTURE_WIDTH = 118  # columns


def run(manifest: Path | None, devices: int, seconds: float, record: Path | None = None) -> int:
    """Run the demo and print the comparison; return the exit code: 0 if it came out as it should, else 1.

    seconds: how long one rank stalls. Raises DemoError for bad input.
    """
    if record:
        _require_picture(record)
    for refusal in refusals():  # the ranks' apply() would refuse it
        raise DemoError(str(refusal))
    console = Console(highlight=False, width=Console().width or 80)  # COLUMNS=0: see diagnose/command.py
    entries = None
    if manifest:
        entries, changes = data.from_manifest(manifest, data.entries_needed(devices))
        for change in changes:
            console.print(escape(f"--manifest={manifest}: {change}"), soft_wrap=True)

    processes.prepare()
    with processes.logs_folder(console) as logs:
        data.write_shards(entries or data.make_audio(logs.path), devices, logs.path)
        problems = _compare(console, logs.path, devices, timedelta(seconds=seconds), record)
        logs.is_kept = bool(problems)
        for problem in problems:
            console.print(f"[bold red]Not as it should be:[/] {escape(problem)}", soft_wrap=True)
    return int(logs.is_kept)


def _require_picture(record: Path) -> None:
    """Refuse at once a file that could not be written at the end."""
    problem = ""
    if record.is_dir():
        problem = "is a folder"
    elif record.suffix != ".svg":
        problem = "is not allowed"
    elif not record.parent.is_dir():
        problem = f"cannot be written: there is no folder {record.parent}"
    elif not os.access(record if record.exists() else record.parent, os.W_OK):
        problem = "cannot be written: permission denied"
    if problem:
        raise DemoError(f"--record={record} {problem}; allowed: a file to write that ends in .svg")


def _compare(console: Console, folder: Path, devices: int, stall: timedelta, record: Path | None) -> list[str]:
    """Do the six runs, one after the other, and print the report; return what did not come out as it should."""
    began = time.monotonic()
    report.introduce(console, devices, stall)

    def both(task: Task) -> report.Pair:
        return report.Pair(
            *(processes.run(console, task, patched, devices, folder, stall) for patched in (False, True))
        )

    with processes.fork_server(console, folder / "import.log"):
        runs = report.Runs(both("a rank stays away"), both("training"), both("positional encoding"))
    report.show(console, runs)
    report.say_what_is_next(console)
    if record:
        picture = Console(
            record=True, file=io.StringIO(), width=_PICTURE_WIDTH, highlight=False, color_system="truecolor"
        )
        report.show(picture, runs)
        svg = picture.export_svg(title="nemo-patches demo")
        # Without its web fonts: a picture in a repository loads nothing.
        record.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")
    console.print(f"[dim]The whole demo took {time.monotonic() - began:.0f} s.[/]")
    return report.problems(runs)
