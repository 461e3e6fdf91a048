"""A class that copies NeMo's encoder instead of inheriting from it.

nemo_patches patches NeMo's classes: a copy keeps the reduce that waits without limit, and DDP
broadcasts its tables.
Link: docs/auto-apply.md#my-encoder-is-a-class-of-my-own
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Class, Code, calls
from nemo_patches.tools.doctor.finding import (
    Findings,
    RuleFinding,
    at,
    note,
    warning,
)
from nemo_patches.tools.doctor.syntax import last_part

NEEDS_NEMO = True
BAD = """\
import torch

class ConformerEncoder(torch.nn.Module):
    def forward(self, audio_signal, length):
        self.update_max_seq_length(audio_signal.size(2), audio_signal.device)

    def update_max_seq_length(self, seq_length, device):
        torch.distributed.all_reduce(seq_length)
        self.set_max_audio_length(seq_length)

    def set_max_audio_length(self, max_audio_length):
        self.max_audio_length = max_audio_length
"""
GOOD = """\
from nemo.collections.asr.modules import ConformerEncoder

class Mine(ConformerEncoder):
    def forward(self, audio_signal, length):
        return super().forward(audio_signal=audio_signal, length=length)
"""


def check(code: Code) -> Findings:
    """Of classes outside of NeMo that have most of an encoder's methods."""
    for each in code.classes:
        if each.is_copy:
            yield _of_class(each)


def _of_class(each: Class) -> RuleFinding:
    shared = [name for name in each.methods if name in each.of_nemo]
    reduces = [
        name
        for name in shared
        if "all_reduce" in map(last_part, calls(each.methods[name]))
    ]
    what = (
        f"{each.name} is a copy of NeMo's {each.base}, by {len(shared)} of its"
        f" {len(each.of_nemo)} methods"
    )
    what += ", and no subclass: nemo_patches does not patch it"
    if reduces:
        what += f", and its {reduces[0]} waits without limit for a missing rank"
    instead = (
        f"class {each.name}({each.base}), without the methods that it does not change; or"
        " by hand what "
    )
    instead += f"`nemo-patches diff --nemo DIR` changes in NeMo's {each.base}"
    make = warning if reduces else note
    return make(what, at(each.name, each.line), instead)
