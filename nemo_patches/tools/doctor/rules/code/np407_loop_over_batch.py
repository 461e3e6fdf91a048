"""A loop over parts of a batch that runs a collective, or the encoder, in each iteration.

A longer recording needs more iterations: its rank waits in those that the others do not run, in the
encoder's length sync, under FSDP in the gathering of parameters, and in backward in the reduction
of gradients.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/16192
"""

# No check: the interpreter finds it, not where the ranks have agreed on something before. It is a
# note where only gradients are reduced, which no_sync may have put off, and at the end of an
# evaluation, where the turns are its batches.

BAD = """\
class Long:
    def forward(self, audio):
        return [self.encoder(part) for part in audio.split(1600, dim=1)]
"""
GOOD = BAD.replace("split(1600", "chunk(8")
