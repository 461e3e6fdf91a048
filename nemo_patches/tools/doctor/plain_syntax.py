"""Python's syntax in fewer forms, so that each is read in one place:
async as plain, match as if.
"""

from __future__ import annotations

import ast

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

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _as_test(node.subject, case.pattern)
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            branch = ast.copy_location(
                ast.If(test, case.body, chain),
                case.pattern,
            )
            branch.end_lineno = node.end_lineno
            chain = [branch]
        return chain[0]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return (
            node
            if node.value is None
            else ast.copy_location(ast.Assign([node.target], node.value), node)
        )


def _as_test(subject: ast.expr, pattern: ast.pattern) -> ast.expr:
    """`subject == value` of `case value`; a pattern that is no value as a name."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return ast.Constant(True)
    if isinstance(pattern, ast.MatchValue):
        return ast.Compare(subject, [ast.Eq()], [pattern.value])
    if isinstance(pattern, ast.MatchSingleton):
        return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
    name = ast.Name(ast.unparse(pattern), ast.Load())
    return ast.Compare(subject, [ast.Is()], [name])
