"""The rules: one file each, in the folder of what they are about, named by its identifier.

The file's docstring explains the rule: a sentence on what it finds, a paragraph on why that matters, and a link. WORST
is the highest severity, and `check` yields the findings. A rule on a machine has a TOPIC, one whose notes nearly every
config gets is FOLDED, and BAD and GOOD are a config that it finds something in, and the same one mended.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

from nemo_patches.tools.doctor.finding import Rule
from nemo_patches.tools.doctor.rules import code, config, machine, ranks


def all_rules() -> tuple[Rule, ...]:
    """Every rule of these folders, by identifier."""
    rules = [_rule(module, folder) for folder in (code, config, machine, ranks) for module in _modules(folder)]
    return tuple(sorted(rules, key=lambda rule: rule.identifier))


def _modules(folder: ModuleType) -> list[ModuleType]:
    return [import_module(f"{folder.__name__}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)]


def _rule(module: ModuleType, folder: ModuleType) -> Rule:
    finds, why, link = _documentation(module)
    identifier = module.__name__.rpartition(".")[2].partition("_")[0].upper()
    about = folder.__name__.rpartition(".")[2]
    texts = {name.lower(): getattr(module, name, "") for name in ("TOPIC", "BAD", "GOOD")}
    folded = getattr(module, "FOLDED", False)
    return Rule(identifier, about, finds, why, link, module.WORST, module.check, folded=folded, **texts)


def _documentation(module: ModuleType) -> tuple[str, str, str]:
    finds, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    why, _, link = rest.rpartition("\nLink: ")
    return " ".join(finds.split()), " ".join(why.split()), link.strip()
