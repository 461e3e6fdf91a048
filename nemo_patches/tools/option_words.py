"""An option of the command line whose values are words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer


def choice(words: Sequence[str], several: bool = False, **more: Any) -> Any:
    """An option for these words, with commas if several; its consumer refuses other values, by the option's name."""

    def starting_with(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return typer.Option(metavar=f"[{'|'.join(words)}]{'[,...]' * several}", autocompletion=starting_with, **more)
