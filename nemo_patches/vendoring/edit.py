"""The edit of one NeMo file, bytes to bytes:
its reduce is bounded in time, its tables are no buffers.

The places are found in the syntax tree and changed in the text. Code that is not exactly what is
known is refused, and every edit is compared with the syntax tree before it is given out. No git
here, and no files.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NoReturn

from nemo_patches.patching.targets import BOUNDED_FUNCTION, BOUNDED_SYNC
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.tables import REDUCES, TABLES, KnownStatement

_IMPORT = f"from {BOUNDED_SYNC} import {BOUNDED_FUNCTION}"
# Ranks no longer grow their tables in the same call: these would hang there.
_COLLECTIVE = re.compile(
    r"all_?(reduce|gather|to_all)\w*|reduce_scatter\w*|broadcast(_object_list)?"
    r"|(monitored_)?barrier"
)
_BUFFER = "register_buffer"
_SYNCS = {name for one in REDUCES for name in (one.function, one.setter)}


def edited(source: bytes, path: str) -> bytes:
    """A file with the edit. Raises DiffError, with the place, if the code is not as expected."""
    encoding, text, tree = _read(source, path)
    file = _File(path, text, tree)
    try:
        for known in (*TABLES, *REDUCES):
            if known.path == path:
                file.replace(known)
        return file.edited().encode(encoding)
    except RecursionError:  # what Python compiles may still be too deep for ast.dump
        raise DiffError(f"{path}:1: found an expression too deep to compare") from None


def left_in(source: bytes, path: str) -> Iterator[str]:
    """The places of an edited file, or of another one, at which a length sync still waits for all
    ranks, also by a function of the same file that it calls.
    """
    if not any(name.encode() in source for name in _SYNCS):
        return
    try:
        _, _, tree = _read(source, path)
    except DiffError:
        return  # Python would not take it either
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node, function in _refused(owner, tree, _SYNCS):
                if _name(node) != _BUFFER:
                    place = f"{path}:{getattr(node, 'lineno', 1)}"
                    yield f"{place} ({_name(node)} in {owner.name}.{function})"


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


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def _refused(
    owner: ast.ClassDef, tree: ast.Module, names: set[str]
) -> Iterator[tuple[ast.AST, str]]:
    """Collectives and buffers in the class's functions of these names, and in what they call."""
    functions = defaultdict(list)
    for one in (*owner.body, *tree.body):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[one.name].append(one)
    todo = {name for name in names if any(f in owner.body for f in functions[name])}
    seen = set(names)
    while todo:
        function = todo.pop()
        for body in functions[function]:
            for node in ast.walk(body):
                name = _name(node)
                if name == _BUFFER or _COLLECTIVE.fullmatch(name):
                    yield node, function
                elif name in functions and name not in seen:
                    seen.add(name)
                    todo.add(name)


class _Replaced(ast.NodeTransformer):
    """Makes the changes in a syntax tree."""

    def __init__(self, instead: dict[ast.AST, str]) -> None:
        self._instead = instead

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if node not in self._instead:
            return node
        new = ast.parse(self._instead[node]).body
        # Functions stay, and get others beside them.
        return [node, *new] if isinstance(node, ast.FunctionDef) else new


class _File:
    """A file of NeMo, whose known statements are replaced; raises DiffError."""

    def __init__(self, path: str, text: str, tree: ast.Module) -> None:
        self._path = path
        self._tree = tree
        self._lines = list(io.StringIO(text, newline=""))
        self._instead: dict[ast.AST, str] = {}
        # Line numbers from 1: the first that goes and the last, and what comes.
        self._changes: list[tuple[int, int, str]] = []
        for number, line in enumerate(self._lines, 1):
            if BOUNDED_FUNCTION in line:
                self._refuse(
                    number, f"found {BOUNDED_FUNCTION}, a name that the edit brings"
                )

    def replace(self, known: KnownStatement) -> None:
        title = f"{known.owner}.{known.function}: "
        owner = self._one(known.owner, self._tree, ast.ClassDef, title)
        function = self._one(known.function, owner, ast.FunctionDef, title)
        forms = dict([(known.known, known.instead), *filter(None, [known.other])])
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        found = [node for node in statements if ast.unparse(node) in forms]
        if len(found) != 1:
            self._refuse_other(known, function, statements, forms, len(found))
        (node,) = found
        last = node.end_lineno or 0
        rest = ""
        if node.lineno == last:  # a comment, as it was
            line = self._lines[last - 1].rstrip("\r\n").encode()
            rest = line[node.end_col_offset :].decode()
        self._change(node, node.lineno, last, forms[ast.unparse(node)], rest)
        if known.methods:
            end = function.end_lineno or 0
            self._change(function, end + 1, end, known.methods)
        if known.setter:
            after = self._place_of_import(owner)
            self._changes.append((after + 1, after, _IMPORT))
            names = {known.function, known.setter}
            gone = {inner for node in self._instead for inner in ast.walk(node)}
            for place, _ in _refused(owner, self._tree, names):
                if place not in gone:
                    text = f"expected no {_name(place)} in what grows the tables"
                    self._refuse(place, f"{title}{text}")

    def edited(self) -> str:
        """The file with all changes. Refuses what makes another program than they should."""
        lines = list(self._lines)
        # From the end to the beginning, so that line numbers hold.
        for first, last, instead in sorted(self._changes, reverse=True):
            neighbour = lines[min(first, len(lines)) - 1]
            end = neighbour[len(neighbour.rstrip("\r\n")) :] or "\n"
            lines[first - 1 : last] = [line + end for line in instead.split("\n")]
        text = "".join(lines)
        try:
            tree = ast.parse(text)
            compile(tree, "edited", "exec", dont_inherit=True)
            tree.body = [node for node in tree.body if ast.unparse(node) != _IMPORT]
            same = ast.dump(tree) == ast.dump(
                _Replaced(self._instead).visit(self._tree)
            )
        except SyntaxError:
            same = False
        if not same:
            first = min(self._changes)[0]
            self._refuse(first, "with the edit here it would be another program")
        return text

    def _refuse(self, place: ast.AST | int, text: str) -> NoReturn:
        line = place if isinstance(place, int) else getattr(place, "lineno", 1)
        raise DiffError(f"{self._path}:{line}: {text}")

    def _refuse_other(
        self,
        known: KnownStatement,
        function: ast.FunctionDef,
        statements: list[ast.stmt],
        forms: dict[str, str],
        count: int,
    ) -> NoReturn:
        """Of a reduce, with the first line at which what is most like it differs."""
        title = f"{known.owner}.{known.function}: "
        if known.setter and not count:
            texts = {ast.unparse(node): node for node in reversed(statements)}
            form, near = max(
                ((form, text) for form in forms for text in texts),
                key=lambda pair: difflib.SequenceMatcher(None, *pair).ratio(),
            )
            for wanted, found in zip(form.split("\n"), near.split("\n"), strict=False):
                if wanted != found:
                    inner = [
                        node for node in ast.walk(texts[near]) if node in statements
                    ]
                    same = (
                        o for o in inner if ast.unparse(o).startswith(found.strip())
                    )
                    text = f"expected `{wanted.strip()}`, found `{found.strip()}`"
                    self._refuse(next(same, texts[near]), title + text)
        first = known.known.split("\n")[0]
        text = f"expected `{first}` and what follows once, found it {count} times"
        self._refuse(function, title + text)

    def _change(
        self, node: ast.stmt, first: int, last: int, instead: str, rest: str = ""
    ) -> None:
        line = self._lines[node.lineno - 1]
        indentation = line[: len(line) - len(line.lstrip())]
        lines = (instead + rest).split("\n")
        text = "\n".join(indentation + line if line else "" for line in lines)
        self._changes.append((first, last, text))
        self._instead[node] = instead

    def _place_of_import(self, owner: ast.ClassDef) -> int:
        """After how many lines: where isort would have it among NeMo's own imports."""
        own = [
            node
            for node in self._tree.body
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("nemo.")
            and node.lineno < owner.lineno
        ]
        if not own:
            self._refuse(owner, "found no import of NeMo's own to put ours beside")
        before = [node for node in own if (node.module or "") < BOUNDED_SYNC]
        return (before[-1].end_lineno or 0) if before else own[0].lineno - 1

    def _one(self, name: str, where: ast.AST, kind: type, title: str):  # type: ignore[no-untyped-def]
        found = [
            node
            for node in ast.walk(where)
            if getattr(node, "name", "") == name and node is not where
        ]
        body = getattr(where, "body", [])
        if len(found) != 1 or type(found[0]) is not kind or found[0] not in body:
            kinds = [type(node).__name__ for node in found]
            text = (
                f"expected one {name}, and that inside no `if` or `try`, found {kinds}"
            )
            self._refuse(found[-1] if found else where, title + text)
        return found[0]
