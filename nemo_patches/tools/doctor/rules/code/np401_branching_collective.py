"""A collective, or a call of the encoder, in a branch that not every rank may take.

All ranks must make the same collectives in the same order. Where the rank or the data of a batch decide, the others may
wait for ever; a call of the encoder is one too, by its length sync, and under FSDP by the gathering of its parameters.
Link: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.code import Code, at
from nemo_patches.tools.doctor.finding import Finding, Severity

WORST = Severity.WARNING

_ENCODERS = ("self.encoder", "self.perception", "self.pre_encoder", "self.perception.encoder")


def check(code: Code) -> Iterator[Finding]:
    """By the tests of the branches around it; a collective of a group of some ranks is left alone."""
    for each in code.classes:
        for method in each.methods.values():
            by_rank = [call.name for call in method.calls if call.by_rank]
            for call in method.calls:
                where, test = f"{each.name}.{method.name}: {call.name}", method.of_data(call)
                if call.collective and not call.of_a_group and call.by_rank:
                    if by_rank.count(call.name) > 1:
                        continue  # the others make it in another branch: one rank first, then the rest
                    what = f"{where} is made only where a test on the rank holds, and nowhere else in this method"
                    instead = "the collective outside of that branch, on every rank"
                elif call.collective and not call.of_a_group and test:
                    what = f"{where} depends on `{test}`: a rank where that is otherwise leaves the others waiting"
                    instead = "the collective in any case, or a test that all ranks share"
                elif call.name in _ENCODERS and test:
                    what = f"{where} is called only if `{test}`: ranks where that differs wait for each other in it"
                    instead = "the call in any case, and its result left out"
                else:
                    continue
                yield Finding(Severity.WARNING, what, (at(call.name, call.line),), instead)
