"""Shorthands for Python's syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # Python 3.10 has no except*
IDENTITIES = (ast.Is, ast.IsNot)
TESTED = (ast.If, ast.While, ast.IfExp, ast.BoolOp)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def last_part(name: str) -> str:
    """`c` of `a.b.c`."""
    return name.rpartition(".")[2]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; of others the text, which no dotted name is."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = node.id if isinstance(node, ast.Name) else "()"
    return ".".join([first, *reversed(parts)])


@lru_cache(maxsize=20_000)
def text_of(node: ast.AST) -> str:
    """The text of an expression; each is asked for on every way through its function."""
    return ast.unparse(node)


class _MatchesAsIfs(ast.NodeTransformer):
    def visit_Match(self, node: ast.Match) -> ast.stmt:
        self.generic_visit(node)
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = case.guard if _takes_all(case.pattern) else _as_test(node.subject, case.pattern)
            if test is None:
                if case.guard is not None or not _takes_all(case.pattern):
                    return node
                chain = case.body
                continue
            if case.guard is not None and test is not case.guard:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            branch = ast.If(test, case.body, chain)
            ast.copy_location(branch, case.pattern)
            branch.end_lineno = node.end_lineno
            chain = [ast.fix_missing_locations(branch)]
        return chain[0] if len(chain) == 1 else ast.copy_location(ast.If(ast.Constant(True), chain, []), node)


def with_matches_as_ifs(tree: ast.Module) -> ast.Module:
    """The tree with each match of plain values, in place, as the chain of tests that it is."""
    _MatchesAsIfs().generic_visit(tree)
    return ast.fix_missing_locations(tree)


def _takes_all(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None


def _as_test(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    """`subject == value` of `case value`; None for a pattern of other kinds."""
    if isinstance(pattern, ast.MatchValue):
        return ast.Compare(subject, [ast.Eq()], [pattern.value])
    if isinstance(pattern, ast.MatchSingleton):
        return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
    if isinstance(pattern, ast.MatchOr) and all(isinstance(each, ast.MatchValue) for each in pattern.patterns):
        values = [each.value for each in pattern.patterns if isinstance(each, ast.MatchValue)]
        return ast.Compare(subject, [ast.In()], [ast.Tuple(values, ast.Load())])
    return None


def nodes(node: ast.AST, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of some kinds in a tree."""
    return (each for each in ast.walk(node) if isinstance(each, kinds))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
