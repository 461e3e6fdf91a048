"""A method without a decorator that NeMo's own method of that name has.

Without typecheck, NeMo's checks of inputs are missing, and `input_types` has no effect. Without no_grad or
inference_mode a rank keeps activations that the others do not keep, and may run out of memory alone.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/core/classes/common.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import NOTE, Findings, at, note
from nemo_patches.tools.doctor.syntax import last_part

WORST = NOTE

_MATTER = ("typecheck", "no_grad", "inference_mode", "property", "classmethod", "staticmethod", "rank_zero_only")


def check(code: Code) -> Findings:
    """Of the installed NeMo's methods."""
    for each in code.classes:
        for name, method in each.methods.items():
            theirs = each.of_nemo.get(name)
            wanted = [found for found in (theirs.decorators if theirs else []) if last_part(found) in _MATTER]
            own = set(map(last_part, method.decorators))
            missing = [found for found in wanted if last_part(found) not in own]
            if missing:
                what = f"{each.name}.{name} has no @{', @'.join(missing)}, as NeMo's {each.base} has"
                instead = ", ".join(f"@{found}" for found in missing)
                yield note(what, at(name, method.node.lineno), instead)
