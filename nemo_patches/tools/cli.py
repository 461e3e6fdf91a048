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
) -> None:
    """Run a command; every Python process started by it patches NeMo when it imports NeMo."""
    from nemo_patches.patching import admission
    from nemo_patches.patching.start_up import DISABLE_VARIABLE
    from nemo_patches.runtime import settings
    from nemo_patches.tools import launch

    given = {
        settings.SYNC_VARIABLE: sync,
        settings.TIMEOUT_VARIABLE: timeout,
        settings.ON_TIMEOUT_VARIABLE: on_timeout,
        settings.CALL_TIMEOUT_VARIABLE: call_timeout,
    }
    try:
        settings.resolve(sync, timeout, on_timeout, call_timeout)
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
) -> None:
    """Print the diff that puts the bounded sync into a NeMo checkout. Writes nothing; exit code 2 where it refuses."""
    from nemo_patches.patching import diffs

    try:
        text = diffs.header(diffs.version_of(nemo)) + diffs.unified(diffs.edits(nemo))
    except diffs.DiffError as error:
        typer.echo(f"nemo-patches diff: {error}", err=True)
        raise typer.Exit(2) from None
    # As bytes: a checkout's carriage returns are part of the diff.
    typer.echo(text.encode("utf-8", "surrogateescape"), nl=False)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
