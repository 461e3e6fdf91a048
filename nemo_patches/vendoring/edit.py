"""The edit of one NeMo file, bytes to bytes:
its reduce is bounded in time, its tables are no buffers.

The places are found in the syntax tree and changed in the text. Code that is not exactly what is
known is refused, and every edit is compared with the syntax tree before it is given out. No git
here, and no files.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from nemo_patches.patching.targets import (
    BOUNDED_FUNCTION,
    BOUNDED_SYNC,
    TARGETS,
    Target,
)
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.tables import TABLES, KnownStatement

_IMPORT = f"from {BOUNDED_SYNC} import {BOUNDED_FUNCTION}"
_FLAG = "self.sync_max_audio_length"
# Ranks no longer grow their tables in the same call: a collective there would hang.
_COLLECTIVES = {
    "distributed",
    "dist",
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
}


def path_of(target: Target) -> str:
    """Where a checkout has a target's file, from its root, with slashes."""
    return target.module.replace(".", "/") + ".py"


def edited(source: bytes, path: str) -> bytes:
    """A file with the edit. Raises DiffError, with the place, if the code is not as expected."""
    encoding, text, tree = _read(source, path)
    target = next((target for target in TARGETS if path_of(target) == path), None)
    file = _KnownFile(
        tree, text, f"{path}:%d: {target}: " if target else f"{path}:%d: "
    )
    try:
        for table in TABLES:
            if table.path == path:
                file.replace(table)
        if target:
            file.bound(target)
        return file.changed().encode(encoding)
    except RecursionError:  # what Python compiles may still be too deep for ast.dump
        file.refuse(1, "found an expression too deep to compare")


def _read(source: bytes, path: str) -> tuple[str, str, ast.Module]:
    """Encoding, text and syntax tree of a file. Raises DiffError, with the place, where Python
    would not take it.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        tree = ast.parse(text)
        # Finds what the parser lets pass, as a late __future__.
        compile(tree, path, "exec", dont_inherit=True)
        if text.encode(encoding) != source:
            raise ValueError(
                f"written anew in {encoding}, it would not be the same bytes"
            )
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        if isinstance(error, UnicodeDecodeError):
            line = source.count(b"\n", 0, error.start) + 1
        text = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise DiffError(f"{path}:{line}: {text}") from error
    return encoding, text, tree


@dataclass(frozen=True)
class _Change:
    """Lines of a file that go, counted from 1, and the statements that come in their place."""

    first: int
    last: int  # first - 1 if lines are only added
    indentation: str
    instead: str
    # What these lines are, or come after; None for the import.
    node: ast.stmt | None = None

    def statements(self) -> list[ast.stmt]:
        """What there is instead of the node."""
        kept = [self.node] if self.node is not None and self.last < self.first else []
        return [*kept, *ast.parse(self.instead).body]


class _Changed(ast.NodeTransformer):
    """Makes the changes in a syntax tree, but for the import."""

    def __init__(self, changes: Iterable[_Change]) -> None:
        self._changes = changes

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        found = [change for change in self._changes if change.node is node]
        self.generic_visit(node)
        return found[0].statements() if found else node


class _KnownFile:
    """A file of NeMo whose code is found exactly as it is known; raises DiffError where it is
    not.
    """

    def __init__(self, tree: ast.Module, text: str, refusal: str) -> None:
        """refusal: how the text of one begins, with %d for the line."""
        self._tree = tree
        self._refusal = refusal
        self._lines = list(io.StringIO(text, newline=""))
        self._changes: list[_Change] = []
        for number, line in enumerate(self._lines, 1):
            if BOUNDED_FUNCTION in line:
                self.refuse(
                    number, f"found {BOUNDED_FUNCTION}, a name that the edit brings"
                )

    def replace(self, table: KnownStatement) -> None:
        """Put another statement into the place of a known one."""
        function = self._function(table.owner, table.function)
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        found = [node for node in statements if ast.unparse(node) == table.known]
        if len(found) != 1:
            first = table.known.split("\n")[0]
            text = (
                f"expected `{first}` and what follows once, found it {len(found)} times"
            )
            self.refuse(function, f"{table.owner}.{table.function}: {text}")
        rest = (
            self._rest_of_line(found[0])
            if found[0].lineno == found[0].end_lineno
            else ""
        )
        self._change(found[0], table.instead + rest)
        if table.methods:
            last = function.end_lineno or 0
            indentation = self._indentation(function)
            self._changes.append(
                _Change(last + 1, last, indentation, table.methods, function)
            )

    def bound(self, target: Target) -> None:
        """Put the call of the bounded sync into the place of the reduce."""
        method = self._function(
            target.owner, target.method, ", ".join(target.parameters)
        )
        statements = (
            method.body[1:] if ast.get_docstring(method) is not None else method.body
        )
        if len(statements) != 2 or not all(
            isinstance(node, ast.If) for node in statements
        ):
            text = (
                f"expected the reduce and the growth, found {len(statements)}"
                " statements"
            )
            self.refuse(method, text)
        reduce, growth = statements
        _, length, device = target.parameters
        local = self._require_reduce(reduce, length, device)
        self._require_growth(growth, target, {local} - {length})
        if target.setter:
            setter = self._function(
                target.owner, target.setter, "self, max_audio_length"
            )
            self._require_local(setter, set())
        for node in ast.walk(self._tree):
            is_set = isinstance(node, ast.Attribute) and not isinstance(
                node.ctx, ast.Load
            )
            name = getattr(node, "attr", "")
            if is_set and name in (target.method, target.setter):
                text = (
                    f"expected no other {name}, found that `{ast.unparse(node)}` is set"
                )
                self.refuse(node, text)
        assert isinstance(reduce, ast.If)
        flag = f", {_FLAG}" if _FLAG in ast.unparse(reduce.test) else ""
        self._change(reduce, f"{length} = {BOUNDED_FUNCTION}(self, {length}{flag})")
        after = self._place_of_import(self._one(ast.ClassDef, target.owner, self._tree))
        self._changes.append(_Change(after + 1, after, "", _IMPORT))

    def changed(self) -> str:
        """The file with all changes. Refuses what makes another program than they should."""
        lines = list(self._lines)
        # From the end to the beginning, so that line numbers hold.
        for change in sorted(
            self._changes, key=lambda change: change.first, reverse=True
        ):
            neighbour = lines[min(change.first, len(lines)) - 1]
            end = neighbour[len(neighbour.rstrip("\r\n")) :] or "\n"
            new = change.instead.split("\n")
            indented = [change.indentation + line if line else "" for line in new]
            lines[change.first - 1 : change.last] = [line + end for line in indented]
        text = "".join(lines)
        try:
            tree = ast.parse(text)
            compile(tree, "edited", "exec", dont_inherit=True)
        except SyntaxError:
            # Of all places the import's alone can be amid a line that goes on, by a backslash.
            last = min(change.last for change in self._changes)
            self.refuse(last, "with our import after this line it would not be Python")
        tree.body = [node for node in tree.body if ast.unparse(node) != _IMPORT]
        expected = ast.dump(_Changed(self._changes).visit(self._tree))  # type: ignore[arg-type]
        if ast.dump(tree) != expected:
            self.refuse(1, "the edit would change more than it should")
        return text

    def refuse(self, place: ast.AST | int, text: str) -> NoReturn:
        line = place if isinstance(place, int) else getattr(place, "lineno", 1)
        raise DiffError(self._refusal % line + text)

    def _change(self, node: ast.stmt, instead: str) -> None:
        last = node.end_lineno or 0
        self._changes.append(
            _Change(node.lineno, last, self._indentation(node), instead, node)
        )

    def _rest_of_line(self, node: ast.stmt) -> str:
        """What stands after a statement: spaces, or a comment of the user's."""
        line = self._lines[(node.end_lineno or 0) - 1].rstrip("\r\n")
        return line.encode()[node.end_col_offset :].decode()

    def _indentation(self, node: ast.stmt) -> str:
        line = self._lines[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def _require_reduce(self, node: ast.stmt, length: str, device: str) -> str:
        """The name of its local variable."""
        assert isinstance(node, ast.If)
        distributed = "torch.distributed.is_initialized()"
        tests = [f"{_FLAG} and {distributed}", distributed]
        test = ast.unparse(node.test)
        if test not in tests or node.orelse:
            found = f"if {test}` with an `else" if node.orelse else f"if {test}"
            self.refuse(
                node, f"expected `if {'` or `if '.join(tests)}`, found `{found}`"
            )
        first = node.body[0]
        assigned = first.targets[0] if isinstance(first, ast.Assign) else None
        name = assigned.id if isinstance(assigned, ast.Name) else "?"
        expected = [
            f"{name} = torch.tensor([{length}], dtype=torch.float32, device={device})",
            f"torch.distributed.all_reduce({name}, op=torch.distributed.ReduceOp.MAX)",
            f"{length} = {name}.int().item()",
        ]
        texts = [ast.unparse(statement) for statement in node.body]
        for statement, text, wanted in zip(node.body, texts, expected, strict=False):
            if text != wanted:
                self.refuse(statement, f"expected `{wanted}`, found `{text}`")
        if len(texts) != len(expected):
            self.refuse(
                node,
                f"expected a reduce of {len(expected)} statements, found {len(texts)}",
            )
        return name

    def _require_growth(self, node: ast.stmt, target: Target, names: set[str]) -> None:
        """names: what the reduce takes along."""
        assert isinstance(node, ast.If)
        length = target.parameters[1]
        wanted = f"{length} > self.max_audio_length"
        if ast.unparse(node.test) != wanted or node.orelse:
            self.refuse(
                node, f"expected `if {wanted}`, found `if {ast.unparse(node.test)}`"
            )
        found = "; ".join(ast.unparse(statement) for statement in node.body)
        if target.setter and found != f"self.{target.setter}({length})":
            self.refuse(
                node.body[0],
                f"expected `self.{target.setter}({length})`, found `{found}`",
            )
        self._require_local(node, names)

    def _require_local(self, where: ast.stmt, names: set[str]) -> None:
        """Refuse, in what grows the tables: these names, a collective, and another buffer."""
        changed = [change.node for change in self._changes if change.node is not None]
        gone = {
            id(inner)
            for node in changed
            for inner in ast.walk(node)
            if node is not where
        }
        refused = names | _COLLECTIVES | {"register_buffer"}
        for node in ast.walk(where):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            if name in refused and id(node) not in gone:
                text = (
                    f"expected no {name} in what grows the tables, found"
                    f" `{ast.unparse(node)}`"
                )
                self.refuse(node, text)

    def _place_of_import(self, owner: ast.ClassDef) -> int:
        """After how many lines: where isort would have it among NeMo's own imports."""
        imports = [node for node in self._tree.body if isinstance(node, ast.ImportFrom)]
        nemos = [
            node
            for node in imports
            if node.level == 0 and (node.module or "").startswith("nemo.")
        ]
        own = [node for node in nemos if node.lineno < owner.lineno]
        if not own:
            self.refuse(
                owner,
                "found no import of NeMo's own before the class to put ours beside",
            )
        before = [node for node in own if (node.module or "") < BOUNDED_SYNC]
        beside = before[-1] if before else own[0]
        first, last = beside.lineno, beside.end_lineno or 0
        overlapping = [
            node
            for node in self._tree.body
            if node.lineno <= last and first <= (node.end_lineno or 0)
        ]
        if len(overlapping) > 1:
            text = (
                "expected an import of NeMo's own on a line of its own, found more on"
                " the line"
            )
            self.refuse(beside, text)
        return last if before else first - 1

    def _function(self, owner: str, name: str, arguments: str = "") -> ast.FunctionDef:
        """A class's own function, without a decorator, and with these arguments if they are
        given.
        """
        kind = self._one(ast.ClassDef, owner, self._tree)
        function: ast.FunctionDef = self._one(ast.FunctionDef, name, kind)
        found = ast.unparse(function.args).replace(": int", "")
        if arguments and found != arguments:
            self.refuse(
                function,
                f"arguments of {name}: expected ({arguments}), found ({found})",
            )
        decorators = [ast.unparse(node) for node in function.decorator_list]
        if decorators:
            self.refuse(
                function, f"decorators of {name}: expected none, found {decorators}"
            )
        return function

    def _one(self, kind: type, name: str, where: ast.Module | ast.ClassDef):  # type: ignore[no-untyped-def]
        found = _bound(name, where)
        if (
            len(found) != 1
            or not isinstance(found[0], kind)
            or found[0] not in where.body
        ):
            outside = where if isinstance(where, ast.ClassDef) else 1
            kinds = [type(node).__name__ for node in found]
            text = (
                f"expected one {name}, and that inside no `if` or `try`, found {kinds}"
            )
            self.refuse(found[-1] if found else outside, text)
        return found[0]


def _bound(name: str, where: ast.Module | ast.ClassDef) -> list[ast.AST]:
    """All that gives a name its value in a module or a class, also inside `if` and the like, by
    line.
    """
    found: list[ast.AST] = []
    rest: list[ast.AST] = list(where.body)
    while rest:
        node = rest.pop()
        given = getattr(node, "asname", None) or getattr(node, "name", "")
        is_set = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        if given == name or (is_set and getattr(node, "id", "") == name):
            found.append(node)
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            rest.extend(ast.iter_child_nodes(node))
    return sorted(found, key=lambda node: getattr(node, "lineno", 0))
