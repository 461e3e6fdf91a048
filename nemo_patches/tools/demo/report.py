"""The demo's result: a sentence on each of its two findings, a table, and what did not come out as it should."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.jobs import TRAINING_STEPS, UNEVEN_RANK, VALIDATE_EVERY, VALIDATION_BATCHES, RunOutcome


@dataclass(frozen=True)
class Runs:
    """What the demo compares."""

    stock_away: RunOutcome
    patched_away: RunOutcome
    stock: RunOutcome
    patched: RunOutcome
    stock_rows: RunOutcome
    patched_rows: RunOutcome


def show(console: Console, runs: Runs) -> None:
    """Print the findings, the table, and what nemo_patches logged."""
    console.print()
    console.print(_sentence_on_hang(runs.stock, runs.patched))
    console.print(_sentence_on_rows(runs.stock_rows, runs.patched_rows))
    console.print()
    console.print(_table(runs))
    if logged := [
        line for rank in (*runs.patched_away.ranks, *runs.patched.ranks) for line in logs.warnings(rank.job.log)
    ]:
        console.print("What nemo_patches said meanwhile:")
        for line in logged:
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def problems(runs: Runs) -> list[str]:
    """What did not come out as it should."""
    deviations = []
    for name, run in (("the training run", runs.patched), ("the positional-encoding run", runs.patched_rows)):
        for rank in run.ranks:
            if not rank.completed:
                deviations.append(f"{name} with nemo_patches: rank {rank.job.rank} {rank.ended} (log: {rank.job.log})")
    if runs.stock.fewest_steps < VALIDATE_EVERY:
        log = runs.stock.ranks[0].job.log
        deviations.append(f"stock ended before its first evaluation, so it shows nothing (log: {log})")
    same, compared = _equal_losses(runs.stock, runs.patched)
    if same < compared:
        deviations.append(f"{compared - same} of {compared} training losses differ from stock's")
    if (rows := runs.patched_rows.worst_rows) and rows.wrong:
        deviations.append(f"{rows.wrong} positional rows are wrong with nemo_patches")
    if runs.stock.completed:
        deviations.append("stock completed too, so it shows no difference")
    if not (runs.stock_rows.worst_rows and runs.stock_rows.worst_rows.wrong):
        deviations.append("stock had no wrong positional row, so it shows no difference")
    return deviations


def _sentence_on_hang(stock: RunOutcome, patched: RunOutcome) -> Text:
    if stock.completed:
        left = "stock completed too"
    elif stock.fewest_steps < VALIDATE_EVERY:
        left = "stock ended before it came to that"
    else:
        left = f"stock lost the whole job after training step {stock.fewest_steps}"
    if patched.completed:
        right = f"with nemo_patches every rank completed all {TRAINING_STEPS} steps"
    else:
        right = "with nemo_patches it did not complete"
    return Text(f"1. One rank evaluates one batch more than the others: {left}; {right}.", style="bold")


def _sentence_on_rows(stock: RunOutcome, patched: RunOutcome) -> Text:
    left, right = (run.worst_rows if run.completed else None for run in (stock, patched))
    text = "2. The length sync switched off, one long batch: "
    text += f"stock silently has {left.wrong} wrong positional rows" if left else "stock's run died"
    text += f"; nemo_patches has {right.wrong or 'none'}." if right else "; the run with nemo_patches died."
    return Text(text, style="bold")


def _table(runs: Runs) -> Table:
    stock, patched = runs.stock, runs.patched
    job = stock.ranks[0].job
    title = f"NeMo {_nemo_version()}, NEST pre-training, {job.world_size} CPU ranks"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("stock", style="" if stock.completed else "red")
    table.add_column("nemo_patches", style="green" if patched.completed else "red")
    for number, both in enumerate(zip(stock.ranks, patched.ranks, strict=True)):
        batches, name = VALIDATION_BATCHES, f"[bold]rank {number}[/]"
        if number == UNEVEN_RANK:
            batches, name = batches + 1, f"{name}, 1 more validation batch"
        if number == job.slow_rank:
            name += f", stalls {job.stall.total_seconds():g} s"
        batches *= TRAINING_STEPS // VALIDATE_EVERY
        calls = [rank.longest_encoder_call.total_seconds() for rank in both]
        table.add_row(name)
        table.add_row("  training steps", *(f"{len(rank.losses)} of {TRAINING_STEPS}" for rank in both))
        table.add_row("  validation batches", *(f"{rank.validation_batches} of {batches}" for rank in both))
        table.add_row("  longest encoder call", *(f"{call:.1f} s" for call in calls))
        table.add_row("  ended", *(escape(rank.ended) for rank in both), end_section=True)
    same, compared = _equal_losses(stock, patched)
    table.add_row("training losses", f"{compared}", f"{same} of stock's {compared} the same, to the last bit")
    table.add_row("time", *(f"{run.took.total_seconds():.0f} s" for run in (stock, patched)), end_section=True)
    table.add_row("[bold]sync_max_audio_length: false[/]")
    cells = [_rows_cell(run) for run in (runs.stock_rows, runs.patched_rows)]
    table.add_row(f"  wrong positional rows, rank {job.slow_rank}", *cells)
    return table


def _rows_cell(run: RunOutcome) -> str:
    rows = run.worst_rows
    if rows and run.completed:
        return f"{rows.wrong} of {rows.total}"
    return escape("; ".join(rank.ended for rank in run.ranks if not rank.completed))


def _equal_losses(stock: RunOutcome, patched: RunOutcome) -> tuple[int, int]:
    """Of the training losses that both runs have: how many are equal to the last bit, and how many there are."""
    pairs = [
        (left.hex(), right.hex())
        for stock_rank, patched_rank in zip(stock.ranks, patched.ranks, strict=True)
        for left, right in zip(stock_rank.losses, patched_rank.losses, strict=False)  # stock has fewer
    ]
    return sum(left == right for left, right in pairs), len(pairs)


def _nemo_version() -> str:
    try:
        return importlib.metadata.version("nemo_toolkit")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout)"
