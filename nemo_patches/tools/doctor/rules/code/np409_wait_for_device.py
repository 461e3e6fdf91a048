"""A wait for the GPU, or a check for NaN, in every step.

The host runs ahead of the GPU. torch.cuda.synchronize, and a test of a tensor such as `x.isnan().any()`, wait until
everything that was enqueued is done, including a collective in which a rank is missing. This costs time in every
step, and in a job that hangs the stack shows this line, wherever the cause is.
Link: docs/diagnose.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import NOTE, Findings, at, note
from nemo_patches.tools.doctor.syntax import DEFINITIONS, dotted, last_part, nodes, words

WORST = NOTE

_EVERY_STEP = ("forward", "forward_internal", "training_step", "update_max_seq_length", "on_train_batch_start")
_LOOKS = words("isfinite isinf isnan")
_SYNCHRONIZES = ("torch.cuda.synchronize", "cuda.synchronize")
_ALWAYS = ("torch.cuda.is_available", "is_cuda", "training", "is_initialized")  # tests that hold in a training
_OF_PYTHON = ("math.", "np.", "numpy.")
_INSTEAD = "a look every some hundred steps, or `nemo-patches run --trace DIR` with the checks inputs and cuda"


def check(code: Code) -> Findings:
    """Not in a branch that something else than the device decides, such as a flag for debugging."""
    for each in code.classes:
        for method in each.methods.values():
            if method.name in _EVERY_STEP:
                for line, text in _waits(method.node.body):
                    what = f"{each.name}.{method.name}: `{text}` waits for the GPU in every step"
                    yield note(what, at(text, line), _INSTEAD)


def _waits(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement in body:
        if isinstance(statement, DEFINITIONS):
            continue
        if isinstance(statement, (ast.If, ast.Assert)) and _looks(statement.test):
            yield statement.lineno, ast.unparse(statement.test)
        if isinstance(statement, ast.If):
            if any(each in ast.unparse(statement.test) for each in _ALWAYS):
                yield from _waits(statement.body)
        elif isinstance(statement, (ast.With, ast.AsyncWith, ast.For, ast.While, ast.Try)):
            yield from _waits(statement.body)
        elif any(dotted(call.func) in _SYNCHRONIZES for call in nodes(statement, ast.Call)):
            yield statement.lineno, "torch.cuda.synchronize()"


def _looks(test: ast.expr) -> bool:
    """Whether a test is of a tensor's contents, and nothing cheaper comes before it."""
    first = test
    while isinstance(first, (ast.BoolOp, ast.UnaryOp)):
        first = first.values[0] if isinstance(first, ast.BoolOp) else first.operand
    names = [dotted(call.func) for call in nodes(first, ast.Call)]
    return any(last_part(name) in _LOOKS and not name.startswith(_OF_PYTHON) for name in names)
