"""The `nemo-patches` command. It must start fast, so torch and NeMo are imported nowhere at module level."""

from __future__ import annotations

import os
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Errors are one line on stderr, so typer's boxes and its rich tracebacks are off.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def nemo_patches() -> None:
    """NVIDIA NeMo's encoder length sync, bounded in time."""


@app.command()
def demo(
    manifest: Annotated[
        Path | None, typer.Option(help="Your own NeMo manifest; without it, synthetic audio is made.")
    ] = None,
    devices: Annotated[int, typer.Option(help="CPU ranks, 2 to 8.")] = 2,
    seconds: Annotated[float, typer.Option(help="How long one rank stalls before the encoder, 3 to 120.")] = 6.0,
) -> None:
    """Train stock NeMo and NeMo with nemo_patches on this machine's CPU, the same way, and compare them."""
    from nemo_patches.tools import demo as demo_command

    try:
        code = demo_command.run(manifest, devices, seconds)
    except demo_command.DemoError as error:
        typer.echo(f"nemo-patches demo: {error}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("nemo-patches demo: interrupted; every rank was ended", err=True)
        code = 130
    raise typer.Exit(code)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What to run, with its arguments, after `--`.")],
    sync: Annotated[str | None, typer.Option(help="bounded, overlapped or local.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Seconds, for the wait of one encoder call.")] = None,
    on_timeout: Annotated[str | None, typer.Option(help="fallback or raise.")] = None,
    call_timeout: Annotated[str | None, typer.Option(help="Seconds of one encoder call; 0: off.")] = None,
    trace: Annotated[str | None, typer.Option(help="A folder; every rank records its encoder calls there.")] = None,
) -> None:
    """Run a command; every Python process started by it patches NeMo when it imports NeMo."""
    from nemo_patches.patching import admission
    from nemo_patches.patching.start_up import DISABLE_VARIABLE
    from nemo_patches.sync import settings
    from nemo_patches.tools import launch
    from nemo_patches.tracing import settings as trace_settings

    given = {
        settings.SYNC_VARIABLE: sync,
        settings.TIMEOUT_VARIABLE: timeout,
        settings.ON_TIMEOUT_VARIABLE: on_timeout,
        settings.CALL_TIMEOUT_VARIABLE: call_timeout,
        trace_settings.TRACE_VARIABLE: trace,
    }
    try:
        settings.resolve(sync, timeout, on_timeout, call_timeout)
        trace_settings.resolve(trace)
        if admission.disabled():
            typer.echo(f"nemo-patches run: {DISABLE_VARIABLE}=1: nothing will be patched", err=True)
        variables = {variable: value for variable, value in given.items() if value is not None}
        launch.become(command, launch.environment_for(os.environ, **variables))
    except settings.SettingsError as error:
        typer.echo(f"nemo-patches run: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:  # the exit codes are those of a shell
        typer.echo(f"nemo-patches run: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(127 if isinstance(error, FileNotFoundError) else 126) from None


@app.command()
def status(json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """What would be patched in this environment. Exit code 0: all; 1: not all; 2: it cannot be told."""
    from nemo_patches.tools import status as status_command

    try:
        report = status_command.examine()
    except status_command.StatusError as error:
        typer.echo(f"nemo-patches status: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(dumps(asdict(report), indent=2))
    else:
        status_command.show(report, Console())
    raise typer.Exit(1 if report.reasons else 0)


@app.command()
def diff(
    nemo: Annotated[Path, typer.Option(help="A NeMo checkout, or the site-packages folder that NeMo is in.")],
    parts: Annotated[
        str, typer.Option(help="nemo: the edit; sync: what it calls; stall: who is missing; several with commas.")
    ] = "nemo,sync,stall",
    check: Annotated[bool, typer.Option("--check", help="Say which committed diff applies; write nothing.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Put it in: all of it, or nothing.")] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="Take it out again.")] = False,
) -> None:
    """Print the diff that puts the bounded sync, or parts of it, into a NeMo checkout; or check, apply, reverse it.

    Exit code 0: done. 1: there is nothing to do (--check: none applies, or it is in; --apply: it is in; --reverse: it
    is not in). 2: refused; nothing was changed.
    """
    from nemo_patches.vendoring import checkouts, command
    from nemo_patches.vendoring.errors import Declined, DiffError
    from nemo_patches.vendoring.parts import parse

    given = [name for name, wanted in (("--check", check), ("--apply", apply), ("--reverse", reverse)) if wanted]
    try:
        if len(given) > 1:
            raise DiffError(f"found {' and '.join(given)}; allowed is one of them, or none to print the diff")
        chosen = parse(parts)
        checkout = checkouts.read(nemo)
        if not reverse and (note := checkouts.uncommitted(checkout)):
            typer.echo(f"nemo-patches diff: {nemo}: {note}", err=True)
        if given:
            action = command.check if check else command.apply if apply else command.reverse
            typer.echo(action(checkout, chosen))
        else:  # as bytes: a checkout's carriage returns are part of the diff
            typer.echo(command.printed(checkout, chosen), nl=False)
    except DiffError as error:
        typer.echo(f"nemo-patches diff: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, Declined) else 2) from None


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG]... [KEY=VALUE]...", help="Configs, and Hydra's overrides for all of them."),
    ] = None,
    patched: Annotated[
        bool, typer.Option("--patched", help="Judge the job with nemo_patches on every rank, not stock NeMo.")
    ] = False,
    select: Annotated[
        list[str] | None, typer.Option(help="Only these rules: NP101, or NP1 for all that begin so.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Not these rules.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Print the safe changes as a diff; write nothing.")] = False,
    write: Annotated[bool, typer.Option("--write", help="With --fix: write them.")] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Compare all ranks: torchrun ... -m nemo_patches doctor --ranks")
    ] = False,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Name every rule.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="RULE", help="Explain one rule.")] = None,
) -> None:
    """Say what in a training config can hang, corrupt or slow a run on several ranks. Nothing in it is executed.

    Without a config: what on this machine can; with --ranks, what differs between the ranks of a job.

    Exit code 0: nothing, or notes only. 1: findings. 2: what cannot be read or done.
    """
    try:
        from nemo_patches.tools.doctor import command
    except ModuleNotFoundError as error:  # a checkout that is not installed; an installed package has brought them
        needed = "pip install omegaconf pyyaml packaging msgspec"
        typer.echo(f"nemo-patches doctor: {error.name} is not installed; needed: {needed}", err=True)
        raise typer.Exit(2) from None
    request = command.Request(
        tuple(arguments or ()),
        patched,
        tuple(select or ()),
        tuple(ignore or ()),
        json,
        fix,
        write,
        list_rules,
        explain,
        ranks,
    )
    raise typer.Exit(command.carry_out(request))


@app.command()
def diagnose(
    path: Annotated[Path, typer.Argument(help="A folder of traces (NEMO_PATCHES_TRACE), or a training log.")],
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow a running job, until Ctrl-C.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw every rank's lag at every call into this PNG file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write all calls for ui.perfetto.dev into this file.")] = None,
) -> None:
    """Say which rank a job hangs for, where it is and why. Exit code 0: nothing found; 1: a finding; 2: cannot tell."""
    from nemo_patches.tools.diagnose import command

    try:
        code = command.run(path, json, watch, plot, perfetto)
    except command.DiagnoseError as error:
        typer.echo(f"nemo-patches diagnose: {error}", err=True)
        code = 2
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
