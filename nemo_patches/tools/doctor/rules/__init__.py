"""The rules: one file each, in the folder of what they are about, named by its identifier.

The file's docstring explains the rule: a sentence on what it finds, a paragraph on why that
matters, and a link. WORST is the highest severity, and `check` yields the findings, each made by
note(), warning(), error() or stops(). Notes take one line, but those of a rule that is WHOLE. BAD
and GOOD are a failing config, or code, and the mended one.
NEEDS_NEMO: it compares with the installed NeMo.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path

from nemo_patches.tools.doctor.finding import Rule

FOLDERS = ("code", "config", "machine", "ranks")


def all_rules() -> tuple[Rule, ...]:
    """Every rule of these folders, by identifier."""
    rules = [
        Rule(name.partition("_")[0].upper(), folder, f"{__name__}.{folder}.{name}")
        for folder in FOLDERS
        for _, name, _ in pkgutil.iter_modules([str(Path(__file__).with_name(folder))])
    ]
    return tuple(sorted(rules, key=lambda rule: rule.identifier))
