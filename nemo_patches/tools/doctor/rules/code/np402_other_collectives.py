"""A method that runs other collectives than NeMo's own method of that name.

The other ranks, and NeMo's callbacks and loops, rely on its own method: one collective more or fewer is safe only if
every rank runs this code.
Link: docs/doctor.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import NOTE, Findings, at, note

WORST = NOTE


def check(code: Code) -> Findings:
    """Not where it calls NeMo's method by super()."""
    for each in code.classes:
        for name, method in each.methods.items():
            theirs = each.of_nemo.get(name)
            inherited = f"super().{name}" in method.calls
            if theirs is None or inherited or method.collectives == theirs.collectives:
                continue
            own, other = (", ".join(found.collectives) or "none" for found in (method, theirs))
            what = f"{each.name}.{name}: its collectives are {own}, those of NeMo's {each.base}: {other}"
            yield note(what, at(name, method.node.lineno))
