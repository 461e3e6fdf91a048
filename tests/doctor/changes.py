"""Mechanical changes that keep what code does: the doctor must find the same in it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

_COLLECTIVES = ("dist.barrier", "dist.all_reduce")
_IMPORTED = "parallel"  # what torch.distributed is called after Imports


class Named(ast.NodeTransformer):
    """`if test:` as `asked = test; if asked:`"""

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        self.generic_visit(node)
        if isinstance(node.test, ast.Name) or any(
            isinstance(each, ast.NamedExpr) for each in ast.walk(node.test)
        ):
            return [node]
        asked = ast.Assign([ast.Name("asked", ast.Store())], node.test)
        return [asked, ast.If(ast.Name("asked", ast.Load()), node.body, node.orelse)]


class Inverted(ast.NodeTransformer):
    """`if test: a else: b` as `if not test: b else: a`"""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        test = ast.UnaryOp(ast.Not(), node.test)
        return ast.If(test, node.orelse or [ast.Pass()], node.body)


class Finally(ast.NodeTransformer):
    """A function's statements in try and finally."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = [ast.Try(node.body, [], [], ast.parse("print('end')").body)]
        return node


class Helper(ast.NodeTransformer):
    """`dist.barrier()` and `dist.all_reduce(..)` by helpers of the file."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in _COLLECTIVES:
            node.func = ast.Name(f"helped_{name[5:]}", ast.Load())
        return node

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        helpers = """
def helped_barrier():
    dist.barrier()
def helped_all_reduce(tensor, op=None, group=None):
    dist.all_reduce(tensor, op=op, group=group)
"""
        node.body[_after_imports(node) : _after_imports(node)] = ast.parse(helpers).body
        return node


def _after_imports(node: ast.Module) -> int:
    imports = (ast.Import, ast.ImportFrom)
    last = [n for n, each in enumerate(node.body) if isinstance(each, imports)]
    return max(last, default=-1) + 1


class Methods(ast.NodeTransformer):
    """The functions of a module as methods of one class, called by self where they call each other."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        moved = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        plain = [each for each in moved if not each.decorator_list]
        names = {each.name for each in plain}
        rest = [each for each in node.body if each not in plain]
        loaded = {
            each.id
            for part in rest
            for each in ast.walk(part)
            if isinstance(each, ast.Name)
        }
        inside = any(
            isinstance(each, ast.arg) and each.arg == "self"
            for part in plain
            for each in ast.walk(part)
        )
        if not plain or names & loaded or inside:
            return node
        for each in plain:
            each.args.args.insert(0, ast.arg("self"))
            _BySelf(names).visit(each)
        made = ast.ClassDef("Made", [], [], list(plain), [], **_no_type_params())
        node.body = [*rest, made]
        return node


def _no_type_params() -> dict[str, Any]:
    return {"type_params": []} if "type_params" in ast.ClassDef._fields else {}


class _BySelf(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        return ast.Attribute(ast.Name("self", ast.Load()), node.id, node.ctx)


class Renamed(ast.NodeTransformer):
    """A function's own names, but its parameters and what is loaded elsewhere, as v0, v1 .."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kept = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        for each in ast.walk(node):
            if isinstance(each, (ast.Global, ast.Nonlocal)):
                kept |= set(each.names)
        names = [
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        ]
        own = [each for each in dict.fromkeys(names) if each not in kept]
        new = {name: f"v{number}" for number, name in enumerate(own)}
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                each.id = new.get(each.id, each.id)
        return node


class Else(ast.NodeTransformer):
    """`if test: return` and what follows, with that as its else; and the other way round."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = self._of(node.body)
        return node

    def _of(self, body: list[ast.stmt]) -> list[ast.stmt]:
        for number, each in enumerate(body):
            if not isinstance(each, ast.If):
                continue
            if isinstance(each.body[-1], ast.Return):
                rest = self._of(body[number + 1 :])
                if each.orelse:  # its else follows it
                    return [
                        *body[:number],
                        ast.If(each.test, each.body, []),
                        *each.orelse,
                        *rest,
                    ]
                if rest:
                    return [*body[:number], ast.If(each.test, each.body, rest)]
        return body


class While(ast.NodeTransformer):
    """`for x in y:` as `it = iter(y); while True: try: x = next(it) ..`"""

    number = 0

    def visit_For(self, node: ast.For) -> list[ast.stmt] | ast.For:
        self.generic_visit(node)
        if node.orelse:
            return node
        self.number += 1
        text = f"""
it{self.number} = iter(())
while True:
    try:
        x = next(it{self.number})
    except StopIteration:
        break
"""
        begin, loop = ast.parse(text).body
        begin.value.args = [node.iter]  # type: ignore[attr-defined]
        loop.body[0].body[0].targets = [node.target]  # type: ignore[attr-defined]
        loop.body += node.body  # type: ignore[attr-defined]
        return [begin, loop]


class Constants(ast.NodeTransformer):
    """A constant number or text of a comparison by a name of the module."""

    def __init__(self) -> None:
        self.named: list[ast.stmt] = []

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        node.comparators = [self._by_name(each) for each in node.comparators]
        return node

    def _by_name(self, node: ast.expr) -> ast.expr:
        if not isinstance(node, ast.Constant) or node.value in (None, True, False):
            return node
        name = f"CONSTANT_{len(self.named)}"
        self.named.append(ast.Assign([ast.Name(name, ast.Store())], node))
        return ast.Name(name, ast.Load())

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        place = _after_imports(node)
        node.body[place:place] = self.named
        return node


class Keywords(ast.NodeTransformer):
    """What a function of the file is given by place, by keyword."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.functions = {
            each.name: each
            for each in node.body
            if isinstance(each, ast.FunctionDef) and not each.args.vararg
        }
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = (
            self.functions.get(node.func.id)
            if isinstance(node.func, ast.Name)
            else None
        )
        if called is None or any(isinstance(each, ast.Starred) for each in node.args):
            return node
        names = [each.arg for each in (*called.args.posonlyargs, *called.args.args)]
        if called.args.posonlyargs or len(node.args) > len(names):
            return node
        pairs = zip(names, node.args, strict=False)
        given = [ast.keyword(name, value) for name, value in pairs]
        return ast.Call(node.func, [], [*given, *node.keywords])


class Imports(ast.NodeTransformer):
    """torch.distributed and its functions under other names."""

    renamed = False

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for each in node.names:
            if each.name == "torch.distributed" and each.asname:
                each.asname = _IMPORTED
        return node

    def visit_Module(self, node: ast.Module) -> ast.Module:
        known = {
            each.asname
            for part in ast.walk(node)
            if isinstance(part, ast.Import)
            for each in part.names
            if each.name == "torch.distributed"
        }
        self.renamed = "dist" in known
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if self.renamed and node.id == "dist":
            node.id = _IMPORTED
        return node


ALL: list[Callable[[], ast.NodeTransformer]] = [
    Named,
    Inverted,
    Finally,
    Helper,
    Methods,
    Renamed,
    Else,
    While,
    Constants,
    Keywords,
    Imports,
]
