"""A class that copies NeMo's encoder instead of inheriting from it, and how it differs.

nemo_patches patches NeMo's classes: a copy keeps the reduce that waits without limit, DDP broadcasts its tables, and
NeMo's later fixes are not in it. NeMo's other ranks, loops and callbacks rely on NeMo's arguments and errors.
Link: docs/auto-apply.md#my-encoder-is-a-class-of-my-own
"""

from __future__ import annotations

import ast

from nemo_patches.tools.doctor.code import Class, Code, Copy, Method
from nemo_patches.tools.doctor.finding import WARNING, Finding, Findings, at, note, warning
from nemo_patches.tools.doctor.syntax import nodes

WORST = WARNING

_MOST_NAMED = 6  # methods of a finding
_FLAGS = ("bypass_pre_encode",)  # arguments that name a branch of NeMo's


def check(code: Code) -> Findings:
    """Of classes outside of NeMo that have most of an encoder's methods."""
    for each in code.classes:
        if each.copy is not None:
            yield _of_class(each, each.copy)
            for name, method in each.methods.items():
                if name in each.copy.methods:
                    yield from _differences(f"{each.name}.{name}", each.copy, method)


def _of_class(each: Class, copy: Copy) -> Finding:
    shared = [name for name in each.methods if name in copy.methods]
    unchanged = [name for name in shared if each.methods[name].same_as(copy.methods[name])]
    reduces = [name for name in shared if "all_reduce" in each.methods[name].collectives]
    what = f"{each.name} is a copy of NeMo's {copy.of}, by {len(shared)} of its {len(copy.methods)} methods"
    what += f" ({len(unchanged)} unchanged), and no subclass: nemo_patches does not patch it"
    if reduces:
        what += f", and its {reduces[0]} waits without limit for a missing rank"
    instead = f"class {each.name}({copy.of})"
    if unchanged:
        more = len(unchanged) - _MOST_NAMED
        instead += f", without {', '.join(unchanged[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"
    instead += f"; or by hand what `nemo-patches diff --nemo DIR` changes in NeMo's {copy.of}"
    make = warning if reduces else note
    return make(what, at(each.name, each.line), instead)


def _differences(where: str, copy: Copy, own: Method) -> Findings:
    theirs = copy.methods[own.name]
    base = copy.of
    missing = [name for name in theirs.arguments if name not in own.arguments]
    if missing and not (own.node.args.kwarg or own.node.args.vararg):
        what = f"{where} does not take {', '.join(missing)}, as NeMo's {base} does: what passes it fails"
        yield note(what, at(own.name, own.node.lineno), "NeMo's arguments")
    for flag in _FLAGS:
        if _tests(theirs, flag) and not _tests(own, flag):
            what = f"{where} has no branch for {flag}, which NeMo's {base} has: its input then has another shape"
            yield note(what, at(own.name, own.node.lineno), f"NeMo's branch for {flag}")
    if not _handlers(theirs):
        for handler in _handlers(own):
            caught = ast.unparse(handler.type) if handler.type else "any error"
            what = f"{where} goes on after {caught}, which NeMo's {base} lets end the rank: this rank's output is then"
            what += " another, and what failed is not seen"
            yield warning(what, at(f"except {caught}", handler.lineno), "raise in the handler")


def _tests(method: Method, name: str) -> bool:
    tests = [each.test for each in ast.walk(method.node) if isinstance(each, (ast.If, ast.IfExp))]
    return any(part.id == name for test in tests for part in nodes(test, ast.Name))


def _handlers(method: Method) -> list[ast.ExceptHandler]:
    """Those that do not raise in the end."""
    handlers = nodes(method.node, ast.ExceptHandler)
    return [each for each in handlers if not isinstance(each.body[-1], ast.Raise)]
