"""Python in fewer forms: match as if, suppress as try, += as =.

Early exits have an else, and a loop that asks for the next item is a for.
"""

from __future__ import annotations

import ast
import copy
from itertools import pairwise
from typing import Any

from nemo_patches.tools.doctor.syntax import nodes, text_of

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_SAME_AS: dict[type[ast.AST], type[ast.AST]] = {
    ast.AsyncFor: ast.For,
    ast.AsyncFunctionDef: ast.FunctionDef,
    ast.AsyncWith: ast.With,
    getattr(ast, "TryStar", ast.Try): ast.Try,
}
_BODIES = ("body", "orelse", "finalbody")


def plain(tree: ast.Module) -> ast.Module:
    """A new form of a module; the lines stay."""
    made = _Plain().visit(tree)
    assert isinstance(made, ast.Module)
    return ast.fix_missing_locations(made)


def leaves(body: list[ast.stmt]) -> bool:
    """Whether nothing behind a block is come to."""
    last = body[-1] if body else None
    return isinstance(last, _LEAVING) or (
        isinstance(last, ast.If) and leaves(last.body) and leaves(last.orelse)
    )


def _nested(body: list[ast.stmt]) -> list[ast.stmt]:
    """What comes after `if test: return` is its else."""
    for number, each in enumerate(body[:-1]):
        if isinstance(each, ast.If) and leaves(each.body) != leaves(each.orelse):
            side = each.orelse if leaves(each.body) else each.body
            side += _nested(body[number + 1 :])
            return body[: number + 1]
    return body


def _joined(body: list[ast.stmt]) -> list[ast.stmt]:
    """A loop over what was made an iterator just before it, and a with of what a test chose."""
    for number, pair in enumerate(pairwise(body)):
        match pair:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp() as chosen),
                ast.With(
                    items=[ast.withitem(context_expr=ast.Name(id=again))]
                ) as block,
            ) if name == again:
                block.items[0].context_expr = chosen
                made = _with_of_either(block)
                return [*body[:number], *_joined([made, *body[number + 2 :]])]
            case (
                ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id="iter"), args=[iterated]),
                ),
                ast.For(iter=ast.Name(id=again)) as loop,
            ) if name == again:
                loop.iter = iterated
                return [*body[:number], *_joined(body[number + 1 :])]
    return body


def _with_of_either(node: ast.With) -> ast.stmt:
    """A with of what a test chooses as a with on either side of the test."""
    match node.items:
        case [ast.withitem(context_expr=ast.IfExp() as chosen) as item]:
            sides: list[ast.stmt] = [
                ast.copy_location(
                    ast.With(
                        [ast.withitem(each, item.optional_vars)],
                        copy.deepcopy(node.body),
                    ),
                    node,
                )
                for each in (chosen.body, chosen.orelse)
            ]
            return ast.copy_location(ast.If(chosen.test, sides[:1], sides[1:]), node)
    return node


class _Plain(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        for name in _BODIES:
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, _joined(_nested(body)))
        kind = _SAME_AS.get(type(node))
        made = kind(**dict(ast.iter_fields(node))) if kind else node
        change = getattr(self, f"visit_{type(made).__name__}", None)
        return ast.copy_location(change(made) if change else made, node)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return node.value

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        value = ast.BinOp(node.target, node.op, node.value)
        return ast.Assign([node.target], value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Assign([node.target], node.value) if node.value else node

    def visit_While(self, node: ast.While) -> ast.AST:
        """`while True: try: x = next(it); except StopIteration: break`"""
        match node:
            case ast.While(
                test=ast.Constant(value=True),
                body=[
                    ast.Try(
                        body=[
                            ast.Assign(
                                targets=[target],
                                value=ast.Call(
                                    func=ast.Name(id="next"), args=[iterated]
                                ),
                            )
                        ],
                        handlers=[
                            ast.ExceptHandler(
                                type=ast.Name(id="StopIteration"),
                                body=[*last, ast.Break()],
                            )
                        ],
                    ),
                    *body,
                ],
            ):
                return ast.For(target, iterated, body or [ast.Pass()], last)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        calls = [each.context_expr for each in node.items]
        errors = [
            each
            for call in calls
            if isinstance(call, ast.Call) and text_of(call.func).endswith("suppress")
            for each in call.args
        ]
        if not errors:
            return _with_of_either(node)
        handler = ast.ExceptHandler(ast.Tuple(errors, ast.Load()), None, [ast.Pass()])
        return ast.Try(node.body, [handler], [], [])

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """A finally that leaves swallows each error."""
        if leaves(node.finalbody) and not isinstance(node.finalbody[-1], ast.Raise):
            handler = ast.ExceptHandler(None, None, [ast.Pass()])
            node.handlers.append(ast.copy_location(handler, node.finalbody[-1]))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """The two halves of a context manager as one, with the block in between as a generator has
        it.
        """
        own = {
            each.name: each for each in node.body if isinstance(each, ast.FunctionDef)
        }
        if "__enter__" in own and "__exit__" in own:
            enter = own["__enter__"]
            _GoesOn().visit(enter)
            leave = own["__exit__"]
            swallows = any(
                each.value and getattr(each.value, "value", True)
                for each in nodes(leave, ast.Return)
            )
            handler = ast.copy_location(
                ast.ExceptHandler(None, None, [ast.Pass()]), leave
            )
            handlers = [handler] if swallows else []
            _GoesOn().visit(leave)
            block = ast.Try([ast.Expr(ast.Yield())], handlers, [], leave.body)
            enter.body.append(ast.copy_location(block, enter))
            node.body.remove(leave)
        begin, step = own.get("__iter__"), own.get("__next__")
        returned = nodes(begin, ast.Return) if begin else []
        if begin and step and [text_of(each) for each in returned] == ["return self"]:
            _Yields().visit(step)
            turns = ast.While(ast.Constant(True), step.body, [])
            _Turns(ast.copy_location(turns, step)).visit(begin)
            node.body.remove(step)
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _test(node.subject, case.pattern)
            if case.guard:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            name = getattr(case.pattern, "name", None)
            body = case.body
            if name:
                body = [ast.Assign([ast.Name(name, ast.Store())], node.subject), *body]
            made = ast.copy_location(ast.If(test, body, chain), case.pattern)
            made.end_lineno = node.end_lineno
            chain = [made]
        return chain[0]


class _Turns(ast.NodeTransformer):
    """With the turns of a generator in place of a return."""

    def __init__(self, turns: ast.While) -> None:
        self.turns = turns

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self.turns


class _Yields(ast.NodeTransformer):
    """An iterator's step as one of a generator."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.copy_location(ast.Expr(ast.Yield(node.value)), node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        ends = node.exc is not None and "StopIteration" in text_of(node.exc)
        return ast.copy_location(ast.Return(None), node) if ends else node


class _GoesOn(ast.NodeTransformer):
    """Without a function's returns."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)


def _test(subject: ast.expr, pattern: ast.pattern) -> ast.expr:
    """What a case of match asks."""
    if isinstance(pattern, ast.MatchOr):
        tests = [_test(subject, each) for each in pattern.patterns]
        return ast.BoolOp(ast.Or(), tests)
    if isinstance(pattern, ast.MatchSequence):
        parts = getattr(subject, "elts", [])
        if len(parts) == len(pattern.patterns):
            pairs = zip(parts, pattern.patterns, strict=True)
            return ast.BoolOp(ast.And(), [_test(*pair) for pair in pairs])
        values = [
            each.value for each in pattern.patterns if isinstance(each, ast.MatchValue)
        ]
        if len(values) == len(pattern.patterns):
            return ast.Compare(subject, [ast.Eq()], [ast.List(values, ast.Load())])
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return ast.Constant(True)
    if isinstance(pattern, ast.MatchValue):
        return ast.Compare(subject, [ast.Eq()], [pattern.value])
    kind: ast.expr = ast.Name(ast.unparse(pattern), ast.Load())
    if isinstance(pattern, ast.MatchSingleton):
        kind = ast.Constant(pattern.value)
    return ast.Compare(subject, [ast.Is()], [kind])
