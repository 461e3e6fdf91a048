"""A model's own code beside the installed NeMo's, by the syntax trees: nothing is run."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from nemo_patches.patching.targets import TARGETS
from nemo_patches.tools import counted
from nemo_patches.tools.doctor.finding import Findings, RuleFinding
from nemo_patches.tools.doctor.interpreter import divergence_texts
from nemo_patches.tools.doctor.interpreter.divergences import divergences
from nemo_patches.tools.doctor.interpreter.plain_python import plain
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.syntax import functions, last_part, nodes

_MOST_BYTES = 1 << 20
_MOST_BASES = 20
_MOST_NESTED = 5000  # calls of ours: some 300 tests in each other

_ENCODERS = [
    target
    for target in TARGETS
    if target.module.startswith("nemo.collections.asr.modules.")
]


Methods = Mapping[str, ast.FunctionDef]


def calls(method: ast.FunctionDef) -> list[str]:
    """The name of every call in it, as written."""
    return [ast.unparse(call.func) for call in nodes(method, ast.Call)]


@dataclass(frozen=True)
class Class:
    """One class with the methods that its body has, and those of NeMo's class that is its base, or
    that it has the methods of (is_copy).
    """

    name: str
    line: int
    methods: Methods
    of_nemo: Methods
    base: str
    is_copy: bool


@dataclass(frozen=True)
class Code:
    """One Python file. divergences: what the interpreter finds, each with its rule."""

    path: Path
    tree: ast.Module
    classes: tuple[Class, ...]
    divergences: tuple[tuple[str, RuleFinding], ...]
    nemo: Path | None

    def found(self, rule: str) -> Findings:
        """What the interpreter finds of one rule."""
        return (each for identifier, each in self.divergences if identifier == rule)

    @property
    def headline(self) -> str:
        bases = sorted({each.base for each in self.classes} - {""})
        compared = "no class of NeMo's in it"
        if bases:
            compared = f"compared with the installed NeMo's {', '.join(bases)}"
        if not self.nemo:
            compared = "NeMo is not installed here, so it is compared with nothing"
        return f"{counted(len(self.classes), 'class', 'es')}; {compared}"


def read(path: Path, nemo: Path | None = None) -> Code:
    """Read one file, and of NeMo the classes that its own inherit from. Raises DoctorError."""
    if nemo is None and (found := importlib.util.find_spec("nemo")) and found.origin:
        # A top-level package is found without running it.
        nemo = Path(found.origin).parent
    tree = _tree(path, _content(path))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _MOST_NESTED))
    try:
        tree = plain(tree)
        return Code(
            path=path,
            tree=tree,
            classes=tuple(
                _class(node, tree, nemo, in_nemo=_in_nemo(path))
                for node in nodes(tree, ast.ClassDef)
            ),
            divergences=tuple(map(divergence_texts.finding, divergences(tree))),
            nemo=nemo,
        )
    except RecursionError:
        raise DoctorError(
            f"{path}: its code is nested too deep to be followed"
        ) from None
    finally:
        sys.setrecursionlimit(limit)


def _in_nemo(path: Path) -> bool:
    """Whether a file is NeMo's own, installed or vendored: its classes are no copies."""
    return ("nemo", "collections") in pairwise(path.absolute().parts)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DoctorError(f"{path}: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise DoctorError(
            f"{path}: more than {_MOST_BYTES} bytes; a file of Python may have no more"
            " here"
        )
    return content


def _tree(path: Path, content: bytes) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DoctorError(
            f"{path}:{getattr(error, 'lineno', None) or 1}: not Python: {error}"
        ) from None


@cache
def _module(path: Path) -> ast.Module:
    """Parse a module of NeMo's; cached, as several examined files may need it."""
    return _tree(path, _content(path))


def _class(
    node: ast.ClassDef, tree: ast.Module, nemo: Path | None, *, in_nemo: bool
) -> Class:
    bases = list(_bases_in_nemo(node, tree, nemo)) if nemo else []
    methods = functions(node)
    encoders = {target.owner for target in _ENCODERS}
    is_encoder = any(base.name in encoders for base in bases)
    copied = _copied(methods, nemo) if nemo and not is_encoder and not in_nemo else None
    like = [copied] if copied else bases
    of_nemo: dict[str, ast.FunctionDef] = {}
    for base in reversed(like):  # the nearest wins
        of_nemo |= functions(base)
    return Class(
        name=node.name,
        line=node.lineno,
        methods=methods,
        of_nemo=of_nemo,
        base=like[0].name if like else "",
        is_copy=copied is not None,
    )


def _copied(methods: Methods, nemo: Path) -> ast.ClassDef | None:
    """The encoder of NeMo's whose length sync a class has as its own, by the methods' names."""
    found: list[ast.ClassDef] = []
    for target in _ENCODERS if "forward" in methods else ():
        path = nemo.joinpath(*target.module.split(".")[1:]).with_suffix(".py")
        if target.method in methods and path.is_file():
            theirs = _defined(target.owner, _module(path), nemo)
            found += theirs[:1] if theirs else ()
    return max(
        found,
        key=lambda each: len(methods.keys() & functions(each).keys()),
        default=None,
    )


def _bases_in_nemo(
    node: ast.ClassDef, tree: ast.Module, nemo: Path
) -> Iterator[ast.ClassDef]:
    """NeMo's classes that it inherits from, nearest first."""
    waiting = [(node, tree)]
    seen = {node.name}
    while waiting and len(seen) < _MOST_BASES:
        inner, where = waiting.pop(0)
        for base in inner.bases:
            name = last_part(ast.unparse(base))
            if name in seen:
                continue
            seen.add(name)
            found = _defined(name, where, nemo)
            if found:
                if found[1] is not tree:
                    yield found[0]
                waiting.append(found)


def _defined(
    name: str, tree: ast.Module, nemo: Path, steps: int = 0
) -> tuple[ast.ClassDef, ast.Module] | None:
    """A class by its name in a module: its own, or one that it imports from NeMo."""
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            return each, tree
    for node in nodes(tree, ast.ImportFrom):
        if not (node.module or "").startswith("nemo.") or steps > _MOST_BASES:
            continue
        inner = nemo.joinpath(*str(node.module).split(".")[1:])
        for alias in node.names:
            for path in (inner.with_suffix(".py"), inner / "__init__.py"):
                if (alias.asname or alias.name) == name and path.is_file():
                    return _defined(alias.name, _module(path), nemo, steps=steps + 1)
    return None
