"""How the commands declare their options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer


def switch(name: str, help_: str, *more: str) -> Any:
    """An option without a value. more: its other names."""
    return typer.Option(name, *more, help=help_)


def with_value(
    *names: str, metavar: str, help_: str, show_default: str = "none", **more: Any
) -> Any:
    """An option with a value; without names it is called as its parameter."""
    return typer.Option(
        *names, metavar=metavar, help=help_, show_default=show_default, **more
    )


def choice(words: Sequence[str], several: bool = False, **more: Any) -> Any:
    """An option for these words, with commas if several; its consumer refuses other values, by the
    option's name.
    """
    metavar = f"[{'|'.join(words)}]"
    if several:
        metavar += "[,...]"
    return typer.Option(metavar=metavar, **more)
