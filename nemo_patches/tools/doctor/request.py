"""The arguments and options of `nemo-patches doctor`:
each is one field, with what typer makes of it.
"""

# No `from __future__ import annotations`: typer reads them, and Pythons differ in what they make of
# one that is a text.

from dataclasses import dataclass
from typing import Annotated

import typer

from nemo_patches.tools.options import choice, switch, with_value

SEVERITIES = ("note", "warning", "error")
FORMATS = ("text", "github", "sarif")


@dataclass(frozen=True)
class Request:
    """What the user gave; the fields are in the order of the command's help."""

    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG]... [KEY=VALUE]...", hidden=True),
    ] = None
    select: Annotated[
        list[str] | None,
        with_value(
            metavar="RULE",
            help_="Only these rules: NP101, or NP1 for all of NP1xx.",
            show_default="all",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None, with_value(metavar="RULE", help_="Not these rules.")
    ] = None
    json: Annotated[bool, switch("--json", "For programs.")] = False
    fix: Annotated[
        bool, switch("--fix", "Print the safe changes as a diff; write nothing.")
    ] = False
    ranks: Annotated[
        bool,
        switch(
            "--ranks", "Compare all ranks: torchrun ... -m nemo_patches doctor --ranks"
        ),
    ] = False
    list_rules: Annotated[bool, switch("--list-rules", "List all rules.")] = False
    explain: Annotated[
        str | None,
        with_value(
            metavar="RULE",
            help_="Explain one rule, with a failing and a fixed example.",
        ),
    ] = None
    severity: Annotated[
        str | None,
        choice(
            SEVERITIES,
            help="The lowest severity that is shown, and counts.",
            show_default="note",
        ),
    ] = None
    quiet: Annotated[
        bool, switch("--quiet", "One line for each finding, and nothing else.", "-q")
    ] = False
    output_format: Annotated[
        str | None,
        choice(
            FORMATS, help="github: annotations on a pull request.", show_default="text"
        ),
    ] = None
    exit_zero: Annotated[bool, switch("--exit-zero", "Exit with 0 instead of 1.")] = (
        False
    )
    against: Annotated[
        str | None,
        with_value(
            metavar="CONFIG",
            help_=(
                "Also show differences from NeMo's own config (nest, canary, ...) or a"
                " file."
            ),
        ),
    ] = None
