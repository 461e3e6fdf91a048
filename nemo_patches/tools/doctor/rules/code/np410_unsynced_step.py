"""A step of the optimizer after a batch whose gradients were not reduced: no_sync is one batch off.

Under no_sync the gradients stay on each rank until a backward pass without it. If the step comes
first, each rank steps by gradients of its own, and the ranks' parameters part, without an error.
Link: https://github.com/modelscope/FunASR/pull/3472
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import (
    Findings,
    RuleFinding,
    at,
    warning,
)
from nemo_patches.tools.doctor.interpreter.members import OPERATIONS
from nemo_patches.tools.doctor.syntax import (
    dotted,
    expressions,
    last_part,
    nodes,
    own_nodes,
    text_of,
)

BAD = """\
def train(model, batches, optimizer, every):
    for i, batch in enumerate(batches):
        with model.no_sync() if i % every != 0 else nullcontext():
            model(batch).backward()
        if (i + 1) % every == 0:
            optimizer.step()
"""
GOOD = BAD.replace("if i % every", "if (i + 1) % every")

_SYNC_FLAGS = ("require_backward_grad_sync", "set_requires_gradient_sync")
_PERIODS = (2, 3, 4)  # batches of a step
_BATCHES = range(12)  # that are tried


def check(code: Code) -> Findings:
    """By trying both tests for the first batches; not where they count by other names."""
    for function in nodes(code.tree, ast.FunctionDef, ast.Module):
        names = {
            name: given[0]
            for name, given in _assigned(function).items()
            if len(given) == 1
        }
        steps = [
            each
            for each in own_nodes(function)
            if isinstance(each, ast.If) and _steps(each)
        ]
        for test, holds in _conditions(function) if steps else ():
            for step in steps:
                if _meet(_resolved(test, names), holds, _resolved(step.test, names)):
                    yield _finding(function, test, holds, step)
                    return


def _finding(
    function: ast.AST, test: ast.expr, holds: bool, step: ast.If
) -> RuleFinding:
    unsynced = text_of(test) if holds else f"not ({text_of(test)})"
    where = f"{function.name}: " if isinstance(function, ast.FunctionDef) else ""
    what = (
        f"{where}the step at `{text_of(step.test)}` comes after a batch whose gradients"
        f" were not reduced, by `{unsynced}`: the ranks' parameters part"
    )
    read = (at(text_of(test), test.lineno), at("step", step.lineno))
    return warning(what, read, "no_sync for all batches but the last before a step")


def _steps(node: ast.If) -> bool:
    calls = (
        dotted(each.func)
        for statement in node.body
        for each in nodes(statement, ast.Call)
    )
    return any(
        name.endswith(".step") and ("opt" in name.lower() or "scaler" in name)
        for name in calls
    )


def _conditions(function: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Tests, each with what it says where gradients are not reduced."""
    for node in own_nodes(function):
        if isinstance(node, (ast.If, ast.IfExp)):
            for part, holds in ((node.body, True), (node.orelse, False)):
                if _has_no_sync(part):
                    yield node.test, holds
        elif isinstance(node, ast.Assign):
            if last_part(dotted(node.targets[0])) in _SYNC_FLAGS:
                yield node.value, False
        elif isinstance(node, ast.Call):
            name = last_part(dotted(node.func))
            if name in _SYNC_FLAGS and node.args:
                yield node.args[0], False
            for each in node.keywords if name == "no_backward_sync" else ():
                if each.arg == "enabled":
                    yield each.value, True


def _has_no_sync(part: ast.expr | list[ast.stmt]) -> bool:
    trees = part if isinstance(part, list) else [part]
    names = (each.attr for tree in trees for each in nodes(tree, ast.Attribute))
    return "no_sync" in names


def _resolved(test: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr:
    return names.get(test.id, test) if isinstance(test, ast.Name) else test


def _meet(condition: ast.expr, holds: bool, step: ast.expr) -> bool:
    """Whether a step comes for certain after a batch that is not reduced, of those that are
    tried.
    """
    mods = [
        each
        for test in (condition, step)
        for each in nodes(test, ast.BinOp)
        if isinstance(each.op, ast.Mod)
    ]
    periods = {text_of(each.right) for each in mods}
    counters = {
        text_of(name)
        for each in mods
        for name in nodes(each.left, ast.Name, ast.Attribute)
    } - {"self"}
    if len(periods) != 1 or len(counters) != 1:
        return False
    period = periods.pop()
    counter = counters.pop()
    answers = []
    for every, batch in product(_PERIODS, _BATCHES):
        known = {period: every, counter: batch}
        answers.append((_holds(condition, known), _holds(step, known)))
    reduced = any(unsynced is (not holds) for unsynced, _ in answers)
    return reduced and (holds, True) in answers


def _holds(test: ast.expr, known: Mapping[str, int]) -> bool | None:
    """Whether a test holds; None if that is not known."""
    value = _value(test, known)
    return None if value is None else bool(value)


def _value(node: ast.expr, known: Mapping[str, int]) -> Any:
    """What an expression of known numbers is; None if that is not known."""
    text = text_of(node)
    if text in known:
        return known[text]
    if isinstance(node, ast.Constant):
        return node.value
    values = [_value(each, known) for each in expressions(node)]
    if isinstance(node, ast.BoolOp):
        ends = isinstance(node.op, ast.Or)
        if any(bool(each) is ends for each in values if each is not None):
            return ends
        return None if None in values else not ends
    if None in values or not isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp)):
        return None
    try:
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(OPERATIONS[type(op)](*sides) for op, *sides in pairs)
        return OPERATIONS[type(node.op)](*values)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    """What each name of a function is assigned; a loop's variable nothing."""
    found: dict[str, list[ast.expr]] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.setdefault(dotted(target), []).append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            found.update((each.id, []) for each in nodes(node.target, ast.Name))
    return found
