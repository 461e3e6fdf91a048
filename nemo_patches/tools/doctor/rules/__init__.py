"""The rules: one file each, named by its identifier, with its docstring as its explanation.

A docstring has a sentence on what the rule finds, a paragraph on why that matters, and a link. WORST is the highest
severity, and `check` yields what was found. Rules on a config are NP1xx, and NP0xx are about reading it: they take a
Job. Rules on the machine are NP2xx and take a Machine; on what ranks told each other, NP3xx, and take the Ranks.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

from nemo_patches.tools.doctor.finding import Rule


def all_rules() -> tuple[Rule, ...]:
    """Every rule of this folder, by identifier."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name.startswith("np"))
    return tuple(_rule(import_module(f"{__name__}.{name}")) for name in names)


def _rule(module: ModuleType) -> Rule:
    finds, why, link = _documentation(module)
    identifier = module.__name__.rpartition(".")[2].partition("_")[0].upper()
    return Rule(identifier, finds, why, link, module.WORST, module.check)


def _documentation(module: ModuleType) -> tuple[str, str, str]:
    finds, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    why, _, link = rest.rpartition("\nLink: ")
    return " ".join(finds.split()), " ".join(why.split()), link.strip()
