"""A method without a decorator that NeMo's own method of that name has.

Without typecheck, NeMo's checks of inputs are missing, and `input_types` has no effect. Without no_grad or
inference_mode a rank keeps activations that the others do not keep, and may run out of memory alone.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/core/classes/common.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code, at
from nemo_patches.tools.doctor.finding import NOTE, Findings, note

WORST = NOTE

_MATTER = ("typecheck", "no_grad", "inference_mode", "property", "classmethod", "staticmethod", "rank_zero_only")


def check(code: Code) -> Findings:
    """Of the installed NeMo's methods."""
    for each in code.classes:
        for name, method in each.methods.items():
            theirs = each.of_nemo.get(name)
            wanted = [found for found in (theirs.decorators if theirs else []) if found.rpartition(".")[2] in _MATTER]
            own = {found.rpartition(".")[2] for found in method.decorators}
            missing = [found for found in wanted if found.rpartition(".")[2] not in own]
            if missing:
                what = f"{each.name}.{name} has no @{', @'.join(missing)}, as NeMo's {each.base} has"
                instead = ", ".join(f"@{found}" for found in missing)
                yield note(what, at(name, method.node.lineno), instead)
