"""The arguments and options of `nemo-patches doctor`:
each is one field, with what typer makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from nemo_patches.tools.options import choice, switch, with_value

SEVERITIES = ("note", "warning", "error")
FORMATS = ("text", "github", "sarif")


def _given(option: Any, default: Any = None) -> Any:
    return field(default=default, metadata={"typer": option})


def _switch(name: str, help_: str, *more: str) -> Any:
    return _given(switch(name, help_, *more), default=False)


@dataclass(frozen=True)
class Request:
    """What the user gave; the fields are in the order of the command's help."""

    arguments: list[str] | None = field(
        default=None,
        metadata={
            "typer": typer.Argument(metavar="[CONFIG]... [KEY=VALUE]...", hidden=True)
        },
    )
    select: list[str] | None = field(
        default=None,
        metadata={
            "typer": with_value(
                metavar="RULE",
                help_="Only these rules: NP101, or NP1 for all of NP1xx.",
                show_default="all",
            )
        },
    )
    ignore: list[str] | None = field(
        default=None,
        metadata={"typer": with_value(metavar="RULE", help_="Not these rules.")},
    )
    json: bool = _switch("--json", "For programs.")
    fix: bool = _switch("--fix", "Print the safe changes as a diff; write nothing.")
    ranks: bool = _switch(
        "--ranks", "Compare all ranks: torchrun ... -m nemo_patches doctor --ranks"
    )
    list_rules: bool = _switch("--list-rules", "List all rules.")
    explain: str | None = _given(
        with_value(
            metavar="RULE",
            help_="Explain one rule, with a failing and a fixed example.",
        )
    )
    severity: str | None = _given(
        choice(
            SEVERITIES,
            help="The lowest severity that is shown, and counts.",
            show_default="note",
        )
    )
    quiet: bool = _switch(
        "--quiet", "One line for each finding, and nothing else.", "-q"
    )
    output_format: str | None = _given(
        choice(
            FORMATS, help="github: annotations on a pull request.", show_default="text"
        )
    )
    exit_zero: bool = _switch("--exit-zero", "Exit with 0 instead of 1.")
    against: str | None = _given(
        with_value(
            metavar="CONFIG",
            help_=(
                "Also show differences from NeMo's own config (nest, canary, ...) or a"
                " file."
            ),
        )
    )


def parameters() -> Iterator[Parameter]:
    """The parameters of the function that typer makes the command of."""
    types = get_type_hints(Request)
    for each in fields(Request):
        option = each.metadata["typer"]
        yield Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[types[each.name], option],
        )


def made(given: dict[str, Any]) -> Request:
    """Build the request from the values that typer passes for these parameters."""
    return Request(**given)
