"""`nemo-patches demo`:
the data, three runs as stock and with nemo_patches, one after the other, and the comparison.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nemo_patches.tools.console import terminal
from nemo_patches.tools.demo import data, job_logs, processes
from nemo_patches.tools.demo.jobs import (
    LENGTH_SYNC_TIMEOUT_S,
    UNEVEN_RANK,
    VALIDATE_EVERY,
    DemoError,
    RunOutcome,
    Task,
)
from nemo_patches.tools.refusals import refusals

_PICTURE_WIDTH = 118  # columns
_NEXT = """
Next, for your own job:
  nemo-patches doctor my_config.yaml           what in it can hang a run
  nemo-patches run -- torchrun ... train.py    the job with nemo_patches, without editing it"""


@dataclass(frozen=True)
class PairOfRuns:
    """A run as stock, and the same run with nemo_patches."""

    title: str
    stock: RunOutcome
    patched: RunOutcome

    @property
    def same_losses(self) -> list[bool]:
        """For each training loss that both have, whether it is the same to the last bit."""
        same = []
        for stock, patched in zip(self.stock.ranks, self.patched.ranks, strict=True):
            both = zip(stock.losses, patched.losses, strict=False)  # stock has fewer
            same += [left.hex() == right.hex() for left, right in both]
        return same

    @property
    def is_as_expected(self) -> bool:
        """Whether it shows what it is to show."""
        if self.stock.jobs[0].task == "positions":
            shows = self.stock.wrong_rows > 0 and self.patched.wrong_rows == 0
        elif self.stock.jobs[0].task == "training":
            shows = (
                not self.stock.completed
                and self.stock.fewest_steps >= VALIDATE_EVERY
                and all(self.same_losses)
            )
        else:
            shows = not self.stock.completed
        return shows and self.patched.completed


def run(
    manifest: Path | None, devices: int, seconds: float, record: Path | None = None
) -> int:
    """Run the demo and print the comparison; return the exit code: 0 if it came out as it should,
    else 1.

    seconds: how long one rank stalls. Raises DemoError for bad input.
    """
    if record:
        _require_picture(record)
    for refusal in refusals():  # the ranks' apply() would refuse it
        raise DemoError(str(refusal))
    entries = data.from_manifest(manifest) if manifest else []
    processes.prepare()
    # It ends the ranks, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # COLUMNS=0: see diagnose/command.py.
    console = terminal(Console().width or 80, highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="nemo-patches-demo-"))
    is_kept = True
    try:
        data.write_shards(entries or data.make_audio(folder), devices, folder)
        comparisons = _compare(console, folder, devices, seconds)
        is_kept = not all(comparison.is_as_expected for comparison in comparisons)
        _show(console, comparisons)
        console.print(_NEXT, markup=False)
        if record:
            _draw(record, comparisons)
        for comparison in comparisons:
            if not comparison.is_as_expected:
                text = f"Not as it should be: {comparison.title} (logs: {folder})"
                console.print(Text(text, style="bold red"), soft_wrap=True)
    except KeyboardInterrupt:
        is_kept = False
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return int(is_kept)


def _require_picture(record: Path) -> None:
    """Refuse at once a file that could not be written at the end."""
    if (
        record.suffix != ".svg"
        or record.is_dir()
        or not os.access(record.parent, os.W_OK)
    ):
        allowed = "a file that ends in .svg, in a folder that may be written to"
        raise DemoError(f"--record={record} is not allowed; allowed: {allowed}")


def _compare(
    console: Console, folder: Path, devices: int, stall_s: float
) -> list[PairOfRuns]:
    """Do the six runs, one after the other."""
    slow = f"rank {devices - 1}"
    tasks: dict[Task, str] = {
        "evaluation": (
            f"1. {slow} stays away from an evaluation; stock is ended after"
            f" {stall_s:g} s"
        ),
        "training": (
            f"2. {slow} stalls once, for {stall_s:g} s; rank {UNEVEN_RANK} evaluates"
            " one batch more"
        ),
        "positions": f"3. no length sync; one long batch on {slow}",
    }
    timeout = f"with nemo_patches (timeout {LENGTH_SYNC_TIMEOUT_S:g} s)"
    console.print(
        f"Real NeMo on {devices} CPU ranks of this machine: each run as stock, then"
        f" {timeout}. One minute."
    )
    console.print(*tasks.values(), sep="\n")
    console.print("[dim]... importing NeMo[/]")
    processes.import_nemo(folder / "import.log")
    comparisons = []
    for task, title in tasks.items():
        runs = []
        for patched in (False, True):
            outcome = processes.run(task, patched, devices, folder, stall_s)
            text = (
                f"... {outcome.jobs[0].version}, {task}: {outcome.ended}"
                f" ({outcome.took_s:.0f} s)"
            )
            console.print(Text(text, style="dim"), soft_wrap=True)
            runs.append(outcome)
        comparisons.append(PairOfRuns(title, *runs))
    return comparisons


def _show(console: Console, comparisons: list[PairOfRuns]) -> None:
    table = Table(show_lines=True)
    table.add_column("")
    table.add_column("stock", style="red")
    table.add_column("with nemo_patches", style="green")
    for comparison in comparisons:
        table.add_row(
            comparison.title,
            escape(str(comparison.stock)),
            escape(str(comparison.patched)),
        )
    console.print(table)
    for comparison in comparisons:
        if same := comparison.same_losses:
            console.print(
                f"Training losses that both have: {sum(same)} of {len(same)} the same,"
                " to the last bit."
            )
        for job in comparison.patched.jobs:
            for line in job_logs.warnings(job.log)[:1]:
                console.print(
                    Text(f"nemo_patches logged in {comparison.title[0]}: {line}")
                )
        if verdict := comparison.stock.verdict:
            console.print(
                Text(
                    "`nemo-patches diagnose`, while stock hung in"
                    f" {comparison.title[0]}: {verdict}"
                )
            )


def _draw(record: Path, comparisons: list[PairOfRuns]) -> None:
    """Without its web fonts: a picture in a repository loads nothing."""
    picture = Console(
        record=True,
        file=io.StringIO(),
        width=_PICTURE_WIDTH,
        highlight=False,
        color_system="truecolor",
    )
    _show(picture, comparisons)
    svg = picture.export_svg(title="nemo-patches demo")
    record.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8"
    )
