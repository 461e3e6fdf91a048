"""What the demo prints: what to expect, what was seen, the next step; and what did not come out as it should."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_patches.text import named
from nemo_patches.tools.demo import incidents
from nemo_patches.tools.demo.jobs import (
    EVALUATION_BATCHES,
    LENGTH_SYNC_TIMEOUT,
    TRAINING_STEPS,
    UNEVEN_RANK,
    VALIDATE_EVERY,
    VALIDATION_BATCHES,
    RankOutcome,
    RunOutcome,
)

_MOST_INCIDENTS = 3  # shown of a run: on a busy machine ranks are late without the demo's doing
_NEXT = """
Next, for your own job:
  nemo-patches doctor my_config.yaml           what in it can hang, corrupt or slow a run
  nemo-patches run -- torchrun ... train.py    the job with nemo_patches, without editing it
  nemo-patches status                          whether it is on; run it on each host
  nemo-patches diagnose                        which rank a job on this host hangs for, and why; nothing to prepare"""


class Pair(NamedTuple):
    """A run as stock, and the same run with nemo_patches."""

    stock: RunOutcome
    patched: RunOutcome


class Runs(NamedTuple):
    """What the demo compares: an evaluation from which a rank stays away, training, and the positional encoding."""

    away: Pair
    training: Pair
    rows: Pair


def introduce(console: Console, devices: int, stall: timedelta) -> None:
    """Print what to expect, before anything starts."""
    slow, stalls, timeout = devices - 1, f"{stall.total_seconds():g} s", f"{LENGTH_SYNC_TIMEOUT.total_seconds():g} s"
    console.print(
        f"[bold]What you will see:[/] real NeMo on {devices} CPU ranks of this machine, each run as stock first, then "
        f"with nemo_patches (timeout {timeout}).\n"
        f" 1. Rank {slow} stays away from the encoder in an evaluation. Stock waits for it in update_max_seq_length, "
        f"without a limit: the demo ends it after {stalls}; `nemo-patches diagnose` has looked at it by then.\n"
        f" 2. NEST pre-training: rank {slow} stalls once, for {stalls}; rank {UNEVEN_RANK} evaluates one batch more.\n"
        f" 3. The length sync switched off, and one long batch on rank {slow}.\n"
        "About a minute where nothing else runs.\n"
    )


def show(console: Console, runs: Runs) -> None:
    """Print the findings, how far each run came, the table, and what nemo_patches and diagnose said."""
    console.print()
    console.print(_sentence_on_hang(*runs.away))
    console.print(_sentence_on_uneven(*runs.training))
    console.print(_sentence_on_rows(*runs.rows))
    console.print()
    console.print("[bold]How far each came:[/]")
    console.print(_bars(runs))
    console.print()
    console.print(_table(runs))
    for title, run in (("1", runs.away.patched), ("2", runs.training.patched)):
        logged = list(incidents.logged(run))
        if logged:
            console.print(f"[bold]What nemo_patches logged in {title}, on each rank that waited:[/]")
        for sentence, place in logged[:_MOST_INCIDENTS]:
            console.print(Text(f"  {sentence}"))
            console.print(Text(f"    {place}", style="dim"))
        if len(logged) > _MOST_INCIDENTS:
            console.print(f"  and {len(logged) - _MOST_INCIDENTS} more such calls")
    if runs.away.stock.verdict:
        console.print("[bold]What `nemo-patches diagnose` said of stock's hang in 1, from outside, while it hung:[/]")
    for line in runs.away.stock.verdict:
        console.print(Text(f"  {line}"))


def say_what_is_next(console: Console) -> None:
    console.print(_NEXT, markup=False)


def problems(runs: Runs) -> list[str]:
    """What did not come out as it should."""
    names = ("run 1", "the training run", "the positional-encoding run")
    deviations = [
        f"{name} with nemo_patches: rank {rank.job.rank} {rank.ended} (log: {rank.job.log})"
        for name, pair in zip(names, runs, strict=True)
        for rank in pair.patched.ranks
        if not rank.completed
    ]
    stock = runs.training.stock
    if stock.fewest_steps < VALIDATE_EVERY:
        log = stock.ranks[0].job.log
        deviations.append(f"stock ended before its first evaluation, so it shows nothing (log: {log})")
    same, compared = _equal_losses(runs.training)
    if same < compared:
        deviations.append(f"{compared - same} of {compared} training losses differ from stock's")
    if (rows := runs.rows.patched.worst_rows) and rows.wrong:
        deviations.append(f"{rows.wrong} positional rows are wrong with nemo_patches")
    if runs.away.stock.completed:
        deviations.append("stock did not wait for the rank that stayed away, so it shows no difference")
    if stock.completed:
        deviations.append("stock completed too, so it shows no difference")
    if not ((rows := runs.rows.stock.worst_rows) and rows.wrong):
        deviations.append("stock had no wrong positional row, so it shows no difference")
    return deviations


def _sentence_on_hang(stock: RunOutcome, patched: RunOutcome) -> Text:
    waiting = next((rank for rank in stock.ranks if not rank.completed), None)
    left = (
        f"stock was {waiting.ended.replace(', killed', ', when the demo ended it')}"
        if waiting
        else "stock completed too"
    )
    longest = max(rank.longest_encoder_call for rank in patched.ranks).total_seconds()
    right = (
        f"every other rank evaluated on, no call took longer than {longest:.1f} s"
        if patched.completed
        else "not all completed"
    )
    return Text(f"1. One rank stays away: {left}; with nemo_patches {right}.", style="bold")


def _sentence_on_uneven(stock: RunOutcome, patched: RunOutcome) -> Text:
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
    return Text(f"2. One rank evaluates one batch more than the others: {left}; {right}.", style="bold")


def _sentence_on_rows(stock: RunOutcome, patched: RunOutcome) -> Text:
    left, right = (run.worst_rows if run.completed else None for run in (stock, patched))
    text = "3. The length sync switched off, one long batch: "
    text += f"stock silently has {left.wrong} wrong positional rows" if left else "stock's run died"
    text += f"; nemo_patches has {right.wrong or 'none'}." if right else "; the run with nemo_patches died."
    return Text(text, style="bold")


def _bars(runs: Runs) -> Table:
    """A bar for each run, by what it has done and not by its time: a run that died early has taken less of it."""
    bars = Table.grid(padding=(0, 2))
    for name in ("title", "version", "bar", "how far"):
        bars.add_column(no_wrap=name != "bar")  # the bars get the room that is left
    for title, pair in (("1. evaluation", runs.away), ("2. training", runs.training)):
        for run, color in zip(pair, ("red", "green"), strict=True):
            done, total, _ = _progress(run)
            bar = ProgressBar(total, done, style="grey39", complete_style=color, finished_style=color)
            bars.add_row(f"  {title}", run.ranks[0].job.version, bar, _how_far(run))
            title = ""
    return bars


def _progress(run: RunOutcome) -> tuple[int, int, str]:
    """How many steps or batches the slowest rank has done, of how many, and the word for them.

    The rank that stays away does not count.
    """
    if run.ranks[0].job.task == "training":
        return run.fewest_steps, TRAINING_STEPS, "steps"
    batches = min(rank.validation_batches for rank in run.ranks if not rank.job.stays_away)
    return batches, EVALUATION_BATCHES, "batches"


def _how_far(run: RunOutcome) -> str:
    done, total, things = _progress(run)
    if run.completed:
        return f"completed all {total} {things}"
    ended = "died" if any(rank.ended.startswith("died") for rank in run.ranks) else "hung"
    return f"{ended} after {done} of {total} {things}"


def _table(runs: Runs) -> Table:
    training = runs.training
    job = training.stock.ranks[0].job
    title = f"NeMo {_nemo_version()}, NEST pre-training, {job.world_size} CPU ranks"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("stock", style="" if training.stock.completed else "red")
    table.add_column("nemo_patches", style="green" if training.patched.completed else "red")
    table.add_row("[bold]1. a rank stays away[/]")
    for row in _grouped(runs.away, _evaluated):
        table.add_row(*row)
    table.add_row("  longest call that came back", *map(_longest, runs.away), end_section=True)
    table.add_row(f"[bold]2. rank {job.slow_rank} stalls, {UNEVEN_RANK} evaluates 1 batch more[/]")
    for row in _grouped(training, _trained):
        table.add_row(*row)
    table.add_row("  longest encoder call", *map(_longest, training))
    same, compared = _equal_losses(training)
    table.add_row("  training losses", f"{compared}", f"{same} of stock's {compared} the same, to the last bit")
    times = (f"{run.took.total_seconds():.0f} s, {_how_far(run)}" for run in training)
    table.add_row("  time", *times, end_section=True)
    table.add_row("[bold]3. sync_max_audio_length: false[/]")
    table.add_row(f"  wrong positional rows, rank {job.slow_rank}", *map(_rows_cell, runs.rows))
    return table


def _grouped(pair: Pair, cell: Callable[[RankOutcome], str]) -> Iterator[tuple[str, str, str]]:
    """A row for each group of ranks with the same cells."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (stock, patched) in enumerate(zip(pair.stock.ranks, pair.patched.ranks, strict=True)):
        groups.setdefault((cell(stock), cell(patched)), []).append(rank)
    return ((f"  {named(ranks)}", escape(left), escape(right)) for (left, right), ranks in groups.items())


def _evaluated(rank: RankOutcome) -> str:
    return f"{rank.validation_batches} of {EVALUATION_BATCHES} batches; {_ended(rank)}"


def _trained(rank: RankOutcome) -> str:
    batches = (VALIDATION_BATCHES + (rank.job.rank == UNEVEN_RANK)) * (TRAINING_STEPS // VALIDATE_EVERY)
    progress = f"{len(rank.losses)} of {TRAINING_STEPS} steps, {rank.validation_batches} of {batches} evaluated"
    return f"{progress}; {_ended(rank)}"


def _ended(rank: RankOutcome) -> str:
    return re.sub(r" \[[\d.:]+\]:\d+", "", rank.ended)  # each rank has another peer's address


def _longest(run: RunOutcome) -> str:
    return f"{max(rank.longest_encoder_call for rank in run.ranks).total_seconds():.1f} s"


def _rows_cell(run: RunOutcome) -> str:
    rows = run.worst_rows
    if rows and run.completed:
        return f"{rows.wrong} of {rows.total}"
    return escape("; ".join(rank.ended for rank in run.ranks if not rank.completed))


def _equal_losses(pair: Pair) -> tuple[int, int]:
    """Of the training losses that both runs have: how many are equal to the last bit, and how many there are."""
    pairs = [
        (left.hex(), right.hex())
        for stock, patched in zip(pair.stock.ranks, pair.patched.ranks, strict=True)
        for left, right in zip(stock.losses, patched.losses, strict=False)  # stock has fewer
    ]
    return sum(left == right for left, right in pairs), len(pairs)


def _nemo_version() -> str:
    try:
        return importlib.metadata.version("nemo_toolkit")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout)"
