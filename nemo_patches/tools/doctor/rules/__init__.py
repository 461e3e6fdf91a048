"""The rules: one file each, in the folder of what they are about, named by its identifier.

The file's docstring explains the rule: a sentence on what it finds, a paragraph on why that
matters, and a link. `check` yields the findings, each made by note(), warning(), error() or
stops(); WORST is the highest severity, where that is not a warning. Notes take one line, but those
of a rule that is WHOLE. BAD and GOOD are a failing config, or code, and the mended one.
NEEDS_NEMO: it compares with the installed NeMo. A rule on code without a `check` has what the
interpreter finds of it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import Any

from nemo_patches.tools.doctor.finding import WARNING, Rule

FOLDERS = ("code", "config", "machine", "ranks")


def all_rules() -> tuple[Rule, ...]:
    """Every rule of these folders, by identifier."""
    rules = [
        _rule(folder, name)
        for folder in FOLDERS
        for _, name, _ in pkgutil.iter_modules([str(Path(__file__).with_name(folder))])
    ]
    return tuple(sorted(rules, key=lambda rule: rule.identifier))


def _rule(folder: str, name: str) -> Rule:
    module = import_module(f"{__name__}.{folder}.{name}")
    finds, _, rest = str(module.__doc__).partition("\n\n")
    why, _, link = rest.rpartition("\nLink:")
    identifier = name.partition("_")[0].upper()
    found: Callable[[Any], Any] = methodcaller("found", identifier)
    without = found if folder == "code" else lambda subject: ()
    return Rule(
        identifier=identifier,
        about=folder,
        finds=" ".join(finds.split()),
        why=" ".join(why.split()),
        link=link.strip(),
        worst=getattr(module, "WORST", WARNING),
        check=getattr(module, "check", without),
        whole=getattr(module, "WHOLE", False),
        needs_nemo=getattr(module, "NEEDS_NEMO", False),
        bad=getattr(module, "BAD", ""),
        good=getattr(module, "GOOD", ""),
    )
