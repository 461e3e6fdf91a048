"""Shorthands for Python's syntax trees, as plain_python.py makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

Function = ast.FunctionDef
Node = TypeVar("Node", bound=ast.AST)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@lru_cache(maxsize=20_000)
def last_part(name: str) -> str:
    """`c` of `a.b.c`."""
    return name.rpartition(".")[2]


@lru_cache(maxsize=20_000)
def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; of others the text, which no dotted name is."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = node.id if isinstance(node, ast.Name) else "()"
    if isinstance(node, ast.Call) and dotted(node.func) == "super":
        first = "super()"
    return ".".join([first, *reversed(parts)])


@lru_cache(maxsize=20_000)
def text_of(node: ast.AST) -> str:
    """The text of an expression; each is asked for on every way through its function."""
    return ast.unparse(node)


def nodes(node: ast.AST, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of some kinds in a tree."""
    return (each for each in _walked(node) if isinstance(each, kinds))


@lru_cache(maxsize=5_000)
def _walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """Several rules ask for the same trees."""
    found = [node]
    for each in found:  # as ast.walk, which takes twice as long
        found += ast.iter_child_nodes(each)
    return tuple(found)


def constant(node: ast.AST | None) -> object:
    """The value of a constant; None of anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def functions(node: ast.ClassDef | ast.Module) -> dict[str, Function]:
    """Those in its body, by their names."""
    return {each.name: each for each in node.body if isinstance(each, Function)}


def expressions(node: ast.AST) -> list[ast.expr]:
    """Those that a node is made of."""
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in nodes(node, ast.Name)}
