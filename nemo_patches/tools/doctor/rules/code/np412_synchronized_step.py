"""A look at the GPU beside each call of the encoder: the CPU waits for the GPU in each step.

People add it while they look for a hang: torch.cuda.synchronize(), or a test of NaN. It moves the
wait from the encoder's collective to another line, and it slows every step.
Link: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import NOTE, Findings, RuleFinding, at, note
from nemo_patches.tools.doctor.interpreter.plain_python import leaves
from nemo_patches.tools.doctor.syntax import (
    DEFINITIONS,
    dotted,
    expressions,
    last_part,
    nodes,
    text_of,
    words,
)

WORST = NOTE
BAD = """\
import torch

class Model(torch.nn.Module):
    def forward(self, audio, length):
        torch.cuda.synchronize()
        return self.encoder(audio, length)
"""
GOOD = BAD.replace(
    "        torch.cuda", "        if self.debug:\n            torch.cuda"
)

_ENCODERS = words("encoder perception update_max_seq_length")
# A call that waits, or a test of NaN that is a value of the CPU's.
_LOOKS = re.compile(
    r"cuda\.synchronize\(|(^not |\bbool\().*\b(isnan|isinf|isfinite)\(.*\.(any|all)\(\)"
    r"|\b(isnan|isinf|isfinite)\(.*\.(any|all)\(\)\.item\("
)


def check(code: Code) -> Findings:
    """Where both are run under the same tests."""
    for function in nodes(code.tree, ast.FunctionDef):
        branches = [
            body
            for each in nodes(function, ast.If)
            for body in (each.body, each.orelse)
        ]
        for body in (function.body, *branches):
            finding = _of(function.name, list(_computed(body)))
            if finding is not None:
                yield finding
                break


def _of(name: str, computed: Sequence[ast.expr]) -> RuleFinding | None:
    """Of the expressions of a block."""
    calls = [call for each in computed for call in nodes(each, ast.Call)]
    encodes = [each for each in calls if last_part(dotted(each.func)) in _ENCODERS]
    looks = [each for each in computed if _LOOKS.search(text_of(each))]
    if not encodes or not looks:
        return None
    text = text_of(looks[0])
    call = text_of(encodes[0].func)
    return note(
        f"{name}: `{text}` stands beside {call}: the CPU waits for the GPU in each step."
        " A guess: what it looks at is on a GPU",
        (at(text, looks[0].lineno), at(call, encodes[0].lineno)),
        "it behind a test that few steps pass, or not at all",
    )


def _computed(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    """The expressions of a block that are computed whenever it is run; a test as `not test`."""
    for each in body:
        if isinstance(each, DEFINITIONS):
            continue
        test = getattr(each, "test", None)
        if test is not None:
            yield ast.copy_location(ast.UnaryOp(ast.Not(), test), each)
        else:
            yield from expressions(each)
        yield from (item.context_expr for item in getattr(each, "items", ()))
        if not isinstance(each, ast.If):
            for name in ("body", "orelse", "finalbody"):
                yield from _computed(getattr(each, name, ()))
        elif leaves(each.body):  # what comes behind it is its other branch
            yield from _computed(each.orelse)
