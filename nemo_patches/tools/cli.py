"""The `nemo-patches` command. It must start fast, so torch and NeMo are imported nowhere at module level."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
