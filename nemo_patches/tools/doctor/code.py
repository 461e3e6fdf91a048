"""A model's own code beside the installed NeMo's, by the syntax trees; nothing is imported or run."""

from __future__ import annotations

import ast
import importlib.util
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.errors import DoctorError

COLLECTIVES = frozenset(
    [
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
    ]
)
# Of an object of these names a method of that name is a collective; "gather" of a tensor is none.
_OWNERS = ("torch.distributed", "dist", "distributed", "self.trainer.strategy", "trainer.strategy")
_RANKS = ("get_rank", "rank", "global_rank", "local_rank", "is_global_zero", "is_rank_zero", "is_global_rank_zero")
_MOST_BYTES = 1 << 20
_MOST_BASES = 20


@dataclass(frozen=True)
class Call:
    """A call in a method: its name as it is written, its line, and the tests of the branches that it is in.

    of_a_group: whether it names a process group, which may have some ranks only.
    """

    name: str
    line: int
    tests: tuple[ast.expr, ...]
    of_a_group: bool

    @property
    def collective(self) -> bool:
        """Whether all ranks must make it."""
        owner, _, name = self.name.rpartition(".")
        return name in COLLECTIVES and owner in _OWNERS

    @property
    def by_rank(self) -> bool:
        """Whether it is made on some ranks only, by a test on the rank."""
        names = {name.rpartition(".")[2] for test in self.tests for name in _names(test)}
        return not names.isdisjoint(_RANKS)


@dataclass(frozen=True)
class Method:
    """One method of a class."""

    name: str
    node: ast.FunctionDef

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Every call in it, in the order of the text."""
        return tuple(_calls(self.node, ()))

    @property
    def collectives(self) -> list[str]:
        """The names of its collectives, without their owners."""
        return [call.name.rpartition(".")[2] for call in self.calls if call.collective]

    @property
    def decorators(self) -> list[str]:
        """As they are written, without arguments."""
        nodes = [node.func if isinstance(node, ast.Call) else node for node in self.node.decorator_list]
        return [ast.unparse(node) for node in nodes]

    def of_data(self, call: Call) -> str:
        """The test that decides by this method's data whether a call is made, as it is written; empty for none."""
        own = {each.arg for each in (*self.node.args.args, *self.node.args.kwonlyargs)} - {"self"}
        stored = (
            node for node in ast.walk(self.node) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        own |= {node.id for node in stored}
        own -= {"dist", "torch"}  # imported in the method
        for test in call.tests:
            presence = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))  # x is None
            if not presence and own & {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}:
                return ast.unparse(test)
        return ""


@dataclass(frozen=True)
class Class:
    """One class with the methods that its body has, and NeMo's method of that name, where a base is NeMo's."""

    name: str
    methods: Mapping[str, Method]
    of_nemo: Mapping[str, Method]
    base: str


@dataclass(frozen=True)
class Code:
    """One file of Python. comments: by line, with what is before them on it."""

    path: Path
    classes: tuple[Class, ...]
    nemo: Path | None
    comments: Mapping[int, str]

    @property
    def headline(self) -> str:
        """One line on what the rules go by."""
        bases = sorted({each.base for each in self.classes if each.base})
        compared = f"compared with the installed NeMo's {', '.join(bases)}" if bases else "no class of NeMo's in it"
        return f"{len(self.classes)} class{'es' * (len(self.classes) != 1)}; " + (
            compared if self.nemo else "NeMo is not installed here, so it is compared with nothing"
        )


def at(name: str, line: int) -> Value:
    """What a rule read in the code."""
    return Value(name, "", f"line {line}", line)


def read(path: Path, nemo: Path | None = None) -> Code:
    """Read one file, and of NeMo the classes that its own inherit from. Raises DoctorError."""
    if nemo is None and (found := importlib.util.find_spec("nemo")) and found.origin:
        nemo = Path(found.origin).parent  # a top-level package is found without running it
    content = _content(path)
    tree = _tree(path, content)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Code(path, tuple(_class(node, tree, nemo) for node in classes), nemo, _comments(path, content))


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DoctorError(f"{path}: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise DoctorError(f"{path}: more than {_MOST_BYTES} bytes; a file of Python may have no more here")
    return content


def _comments(path: Path, content: bytes) -> dict[int, str]:
    try:
        tokens = list(tokenize.tokenize(BytesIO(content).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise DoctorError(f"{path}: its comments cannot be read: {error}") from None
    return {each.start[0]: each.line[: each.end[1]] for each in tokens if each.type == tokenize.COMMENT}


def _tree(path: Path, content: bytes) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DoctorError(f"{path}:{getattr(error, 'lineno', None) or 1}: not Python: {error}") from None


def _class(node: ast.ClassDef, tree: ast.Module, nemo: Path | None) -> Class:
    bases = list(_bases_in_nemo(node, tree, nemo)) if nemo else []
    of_nemo: dict[str, Method] = {}
    for _, base in bases:
        of_nemo = {**_methods(base), **of_nemo}
    return Class(node.name, _methods(node), of_nemo, bases[0][0] if bases else "")


def _methods(node: ast.ClassDef) -> dict[str, Method]:
    return {each.name: Method(each.name, each) for each in node.body if isinstance(each, ast.FunctionDef)}


def _bases_in_nemo(node: ast.ClassDef, tree: ast.Module, nemo: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    """NeMo's classes that it inherits from, nearest first."""
    waiting, seen = [(node, tree)], {node.name}
    while waiting and len(seen) < _MOST_BASES:
        inner, where = waiting.pop(0)
        for base in inner.bases:
            name = ast.unparse(base).rpartition(".")[2]
            if name in seen:
                continue
            seen.add(name)
            found = _defined(name, where, nemo)
            if found:
                if found[1] is not tree:
                    yield name, found[0]
                waiting.append(found)


def _defined(name: str, tree: ast.Module, nemo: Path, steps: int = 0) -> tuple[ast.ClassDef, ast.Module] | None:
    """A class by its name in a module: its own, or one that it imports from NeMo."""
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            return each, tree
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("nemo.") or steps > _MOST_BASES:
            continue
        original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
        inner = nemo.joinpath(*str(node.module).split(".")[1:])
        for path in (inner.with_suffix(".py"), inner / "__init__.py") if original else ():
            if path.is_file():
                return _defined(str(original), _tree(path, _content(path)), nemo, steps + 1)
    return None


def _calls(node: ast.AST, tests: tuple[ast.expr, ...]) -> Iterator[Call]:
    if isinstance(node, ast.Call):
        of_a_group = any(keyword.arg == "group" for keyword in node.keywords)
        yield Call(ast.unparse(node.func), node.lineno, tests, of_a_group)
    test = node.test if isinstance(node, (ast.If, ast.While, ast.IfExp)) else None
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests if test is None or child is test else (*tests, test))


def _names(test: ast.expr) -> Iterator[str]:
    for node in ast.walk(test):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield ast.unparse(node)
