"""A loop over parts of a batch that runs a collective, or the encoder, in each iteration.

A longer recording needs more iterations: its rank waits in those that the others do not run, in the
encoder's length sync, under FSDP in the gathering of parameters, and in backward in the reduction
of gradients.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/16192
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import Findings

BAD = """\
class Long:
    def forward(self, audio):
        return [self.encoder(part) for part in audio.split(1600, dim=1)]
"""
GOOD = BAD.replace("split(1600", "chunk(8")


def check(code: Code) -> Findings:
    """Not where the ranks have agreed on something before; a note where only gradients are reduced,
    which no_sync may have put off, and at the end of an evaluation, where the turns are its
    batches."""
    return code.found("NP407")
