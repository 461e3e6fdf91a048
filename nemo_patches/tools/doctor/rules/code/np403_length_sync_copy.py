"""An encoder's own update_max_seq_length that leaves out a call made by NeMo's.

Without set_max_audio_length the positional encodings never grow, and a longer input fails. Without
the reduce, or the test of sync_max_audio_length, ranks grow differently. nemo_patches does not
patch a method that it does not know.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/3304
"""

from __future__ import annotations

import ast

from nemo_patches.tools.doctor.code import Code, calls
from nemo_patches.tools.doctor.finding import Findings, at, warning
from nemo_patches.tools.doctor.syntax import last_part

NEEDS_NEMO = True
BAD = """\
from nemo.collections.asr.modules import ConformerEncoder

class Mine(ConformerEncoder):
    def update_max_seq_length(self, seq_length, device):
        self.max_audio_length = seq_length
"""
GOOD = BAD.replace(
    "self.max_audio_length = seq_length",
    "super().update_max_seq_length(seq_length, device)",
)

_CALLS = ("is_initialized", "all_reduce", "set_max_audio_length", "extend_pe")
_METHODS = (
    "update_max_seq_length",
    "update_max_sequence_length",
    "set_max_audio_length",
)


def check(code: Code) -> Findings:
    """Against the installed NeMo's method."""
    for each in code.classes:
        for name in _METHODS:
            own = each.methods.get(name)
            theirs = each.of_nemo.get(name)
            if own is None or theirs is None or each.is_copy:
                continue
            if f"super().{name}" in calls(own):
                continue
            missing = [
                call for call in _last_parts(theirs) if call not in _last_parts(own)
            ]
            if missing:
                what = (
                    f"{each.name}.{name} does not call {', '.join(missing)}, as NeMo's"
                    f" {each.base} does"
                )
                yield warning(what, at(name, own.lineno), f"super().{name}(...)")


def _last_parts(method: ast.FunctionDef) -> list[str]:
    names = dict.fromkeys(map(last_part, calls(method)))
    return [name for name in names if name in _CALLS]
