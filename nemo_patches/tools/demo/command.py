"""The demo's own process: makes the data, starts one process per rank, ends those that hang, and prints the comparison.

It imports neither torch nor NeMo; what a rank does is in rank.py, and in what that imports.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from nemo_patches.tools.demo import data, processes, report
from nemo_patches.tools.demo.errors import DemoError

FEWEST_DEVICES, MOST_DEVICES = 2, 8
SHORTEST_STALL_S, LONGEST_STALL_S = 3, 120


def run(manifest: Path | None, devices: int, seconds: float) -> int:
    """Run the demo and print the comparison; return the exit code: 0 if it came out as it should, else 1.

    seconds: how long one rank stalls. Raises DemoError for bad input.
    """
    if not FEWEST_DEVICES <= devices <= MOST_DEVICES:
        raise DemoError(f"--devices={devices} is not allowed; allowed: {FEWEST_DEVICES} to {MOST_DEVICES}")
    if not SHORTEST_STALL_S <= seconds <= LONGEST_STALL_S:
        raise DemoError(f"--seconds={seconds:g} is not allowed; allowed: {SHORTEST_STALL_S} to {LONGEST_STALL_S}")
    if importlib.util.find_spec("nemo") is None:
        raise DemoError("NeMo is not installed; the demo needs it: pip install 'nemo_toolkit[asr]'")
    console = Console(highlight=False)
    entries = None
    if manifest:
        entries, changes = data.from_manifest(manifest, data.entries_needed(devices))
        for change in changes:
            console.print(escape(f"--manifest={manifest}: {change}"), soft_wrap=True)

    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="nemo-patches-demo-"))
    keep = False
    try:
        data.write_shards(entries or data.make_audio(folder), devices, folder)
        problems = _compare(console, folder, devices, timedelta(seconds=seconds))
        keep = bool(problems)
        for problem in problems:
            console.print(f"[bold red]Not as it should be:[/] {escape(problem)}", soft_wrap=True)
        if keep:
            console.print(f"The ranks' logs: {folder}", soft_wrap=True)
        return 1 if problems else 0
    except DemoError:
        keep = True  # its text names a log
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt  # SIGTERM ends the ranks as Ctrl-C does


def _compare(console: Console, folder: Path, devices: int, stall: timedelta) -> list[str]:
    """Do the four runs, one after the other, and print the report; return what did not come out as it should."""
    began = time.monotonic()
    with processes.fork_server(console, folder / "import.log"):
        runs = report.Runs(
            stock=processes.run(console, "training", False, devices, folder, stall),
            patched=processes.run(console, "training", True, devices, folder, stall),
            stock_rows=processes.run(console, "positional encoding", False, devices, folder, stall),
            patched_rows=processes.run(console, "positional encoding", True, devices, folder, stall),
        )
    report.show(console, runs)
    console.print(f"[dim]The whole demo took {time.monotonic() - began:.0f} s.[/]")
    return report.problems(runs)
