"""Python's syntax in fewer forms, so that each is read in one place:
async as plain, match as if, suppress as try.
"""

from __future__ import annotations

import ast
from typing import Any

from nemo_patches.tools.doctor.syntax import dotted, functions, nodes

_PLAIN: dict[str, type[ast.stmt]] = {
    "AsyncFor": ast.For,
    "AsyncFunctionDef": ast.FunctionDef,
    "AsyncWith": ast.With,
    "TryStar": ast.Try,  # which Python 3.10 has not
}

_OPERANDS = 2  # of divmod


def plain(tree: ast.Module) -> ast.Module:
    """The tree, changed in place; what stands for something keeps its lines."""
    _Plain().visit(tree)
    return ast.fix_missing_locations(tree)


class _Plain(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        """The inner nodes first; what is made of a node stands where the node did."""
        self.generic_visit(node)
        change = getattr(self, f"visit_{type(node).__name__}", self._renamed)
        made = change(node)
        for each in made if isinstance(made, list) else [made]:
            ast.copy_location(each, node)
        return made

    def _renamed(self, node: ast.AST) -> ast.AST:
        form = _PLAIN.get(type(node).__name__)
        return form(**dict(ast.iter_fields(node))) if form else node

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return node.value

    def visit_With(self, node: ast.With) -> ast.AST:
        """`with suppress(RuntimeError):`"""
        errors = [
            each
            for item in node.items
            for call in nodes(item.context_expr, ast.Call)
            if dotted(call.func).endswith("suppress")
            for each in call.args
        ]
        if not errors:
            return node
        kind = ast.Tuple(errors, ast.Load()) if len(errors) > 1 else errors[0]
        handler = ast.ExceptHandler(kind, None, [ast.Pass()])
        return ast.Try(node.body, [handler], [], [])

    def visit_Match(self, node: ast.Match) -> ast.AST:
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _as_test(node.subject, case.pattern)
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            name = getattr(case.pattern, "name", None)  # of `case name`
            if name:
                named = ast.Assign([ast.Name(name, ast.Store())], node.subject)
                case.body.insert(0, named)
            branch = ast.copy_location(ast.If(test, case.body, chain), case.pattern)
            branch.end_lineno = node.end_lineno
            chain = [branch]
        return chain[0]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """A context manager, which does at its end what follows its beginning."""
        begin = functions(node).get("__enter__")
        end = functions(node).get("__exit__")
        if begin and end:
            begin.body = [
                each for each in begin.body if not isinstance(each, ast.Return)
            ]
            begin.body += end.body
            node.body.remove(end)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """`return x if test else y`"""
        value = node.value
        if not isinstance(value, ast.IfExp):
            return node
        return ast.If(value.test, [ast.Return(value.body)], [ast.Return(value.orelse)])

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        """`a, b = x, y`, and `a, b = divmod(x, y)`"""
        targets = getattr(node.targets[-1], "elts", [])
        values = getattr(node.value, "elts", [])
        call = node.value
        if (
            isinstance(call, ast.Call)
            and dotted(call.func) == "divmod"
            and len(call.args) == _OPERANDS
        ):
            left, right = call.args
            values = [
                ast.BinOp(left, kind(), right) for kind in (ast.FloorDiv, ast.Mod)
            ]
        if not targets or len(targets) != len(values) or len(node.targets) > 1:
            return node
        return [
            ast.Assign([target], value)
            for target, value in zip(targets, values, strict=True)
        ]

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        read = node.target
        if isinstance(read, ast.Name):
            read = ast.Name(read.id, ast.Load())
        return ast.Assign([node.target], ast.BinOp(read, node.op, node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node if node.value is None else ast.Assign([node.target], node.value)


def _as_test(subject: ast.expr, pattern: ast.pattern) -> ast.expr:
    """`subject == value` of `case value`; a pattern that is more than values as a name."""
    if isinstance(pattern, ast.MatchOr):
        tests = [_as_test(subject, each) for each in pattern.patterns]
        return ast.BoolOp(ast.Or(), tests)
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return ast.Constant(True)
    if isinstance(pattern, ast.MatchValue):
        return ast.Compare(subject, [ast.Eq()], [pattern.value])
    kind = (
        ast.Constant(pattern.value)
        if isinstance(pattern, ast.MatchSingleton)
        else ast.Name(ast.unparse(pattern), ast.Load())
    )
    return ast.Compare(subject, [ast.Is()], [kind])
