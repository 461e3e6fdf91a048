"""Python's syntax in fewer forms, so that each is read in one place:
async as plain, match as if, suppress as try.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from nemo_patches.tools.doctor.syntax import dotted, functions, nodes

_PLAIN: dict[str, type[ast.stmt]] = {
    "AsyncFor": ast.For,
    "AsyncFunctionDef": ast.FunctionDef,
    "AsyncWith": ast.With,
    "TryStar": ast.Try,  # which Python 3.10 has not
}


def plain(tree: ast.Module) -> ast.Module:
    """The tree, changed in place; what stands for something keeps its lines."""
    _Plain().generic_visit(tree)
    return ast.fix_missing_locations(tree)


class _Plain(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        form = _PLAIN.get(type(node).__name__)
        return (
            ast.copy_location(form(**dict(ast.iter_fields(node))), node)
            if form
            else node
        )

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return node.value

    def visit_With(self, node: ast.With) -> ast.AST:
        """`with suppress(RuntimeError):`"""
        self.generic_visit(node)
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
        handler = ast.copy_location(ast.ExceptHandler(kind, None, [ast.Pass()]), node)
        return ast.copy_location(ast.Try(node.body, [handler], [], []), node)

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _as_test(node.subject, case.pattern)
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            name = getattr(case.pattern, "name", None)  # of `case name`
            if name:
                named = ast.Assign([ast.Name(name, ast.Store())], node.subject)
                case.body.insert(0, ast.copy_location(named, case.pattern))
            branch = ast.copy_location(ast.If(test, case.body, chain), case.pattern)
            branch.end_lineno = node.end_lineno
            chain = [branch]
        return chain[0]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """A context manager, which does at its end what follows its beginning."""
        self.generic_visit(node)
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
        self.generic_visit(node)
        if not isinstance(node.value, ast.IfExp):
            return node
        body, orelse = (
            ast.copy_location(ast.Return(each), node)
            for each in (node.value.body, node.value.orelse)
        )
        return ast.copy_location(ast.If(node.value.test, [body], [orelse]), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | Sequence[ast.AST]:
        """`a, b = x, y`, and `a, b = divmod(x, y)`"""
        self.generic_visit(node)
        targets = getattr(node.targets[-1], "elts", [])
        values = getattr(node.value, "elts", [])
        call = node.value
        if isinstance(call, ast.Call) and dotted(call.func) == "divmod":
            left, right = call.args
            values = [
                ast.BinOp(left, kind(), right) for kind in (ast.FloorDiv, ast.Mod)
            ]
        if not targets or len(targets) != len(values) or len(node.targets) > 1:
            return node
        return [
            ast.copy_location(ast.Assign([target], value), node)
            for target, value in zip(targets, values, strict=True)
        ]

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        read = node.target
        if isinstance(read, ast.Name):
            read = ast.Name(read.id, ast.Load())
        changed = ast.BinOp(read, node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], changed), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return (
            node
            if node.value is None
            else ast.copy_location(ast.Assign([node.target], node.value), node)
        )


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
