"""The edit of one NeMo file, bytes to bytes: its reduce goes, an import and a class decorator come.

The place is found in the syntax tree and changed in the text. Code that is not exactly what is known is refused, and
every edit is compared with the syntax tree before it is given out. No git here, and no files.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import lru_cache

from nemo_patches.patching.targets import Target, has_diff
from nemo_patches.vendoring.errors import DiffError

VENDORED = "nemo.collections.asr.parts.nemo_patches"  # our package inside a vendored NeMo
_IMPORT = f"from {VENDORED} import bounded_length_sync"
_IN_ITS_PLACE = (
    "# nemo_patches: it is the largest of all ranks already, agreed on in bounded time (bounded_length_sync)"
)
_COLLECTIVES = {"distributed", "dist", "all_reduce", "all_gather", "broadcast", "barrier"}


def path_of(target: Target) -> str:
    """Where a checkout has a target's file, from its root, with slashes."""
    return target.module.replace(".", "/") + ".py"


@lru_cache(maxsize=32)  # what is taken out is edited again, to see whether it gives the same
def edited(source: bytes, target: Target) -> bytes:
    """A target's file with the edit. Raises DiffError, with the place, if the code is not as expected."""
    try:
        return _edited(source, target, path_of(target))
    except RecursionError:  # what Python compiles may still be too deep for ast.dump
        raise DiffError(f"{path_of(target)}:1: {target}: found an expression too deep to compare") from None


def is_edited(source: bytes, path: str) -> bool:
    """Whether a file has the edit, of any nemo_patches. Raises DiffError if Python does not accept it."""
    try:
        return has_diff(source, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DiffError(f"{path}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}") from error


def constants(source: bytes, path: str) -> dict[str, str]:
    """The constants of a module, read without running it. Raises DiffError if Python does not accept it."""
    _, _, tree = _read(source, path)
    return {
        node.targets[0].id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str | int)
    }


def _edited(source: bytes, target: Target, path: str) -> bytes:
    encoding, text, tree = _read(source, path)
    lines = list(io.StringIO(text, newline=""))
    for number, line in enumerate(lines, 1):
        if "bounded_length_sync" in line:
            raise DiffError(f"{path}:{number}: {target}: found bounded_length_sync, a name that the edit brings")
    known = _KnownCode(tree, target, path)
    end = "\r\n" if lines[known.owner.lineno - 1].endswith("\r\n") else "\n"

    def indent(node: ast.stmt) -> str:
        line = lines[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    # From the end to the beginning, so that line numbers hold.
    reduce = known.reduce
    lines[reduce.lineno - 1 : reduce.end_lineno] = [indent(reduce) + _IN_ITS_PLACE + end]
    names = f'"{target.method}"' + (f', "{target.setter}"' if target.setter else "")
    lines.insert(known.owner.lineno - 1, f"{indent(known.owner)}@bounded_length_sync({names}){end}")
    lines.insert(known.import_after, _IMPORT + end)
    text = "".join(lines)
    known.require_nothing_else(text)
    return text.encode(encoding)


def _read(source: bytes, path: str) -> tuple[str, str, ast.Module]:
    """Encoding, text and syntax tree of a file. Raises DiffError, with the place, where Python would not take it."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        tree = ast.parse(text)
        compile(tree, path, "exec", dont_inherit=True)  # finds what the parser lets pass, as a late __future__
        if text.encode(encoding) != source:
            raise ValueError(f"written anew in {encoding}, it would not be the same bytes")
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        if isinstance(error, UnicodeDecodeError):
            line = source.count(b"\n", 0, error.start) + 1
        raise DiffError(f"{path}:{line}: {getattr(error, 'msg', None) or error or type(error).__name__}") from error
    return encoding, text, tree


class _KnownCode:
    """A target's code in a file's syntax tree, found exactly as it is known; raises DiffError where it is not."""

    def __init__(self, tree: ast.Module, target: Target, path: str) -> None:
        self._tree, self._target, self._path = tree, target, path
        self.owner = self._one(ast.ClassDef, target.owner, tree)
        method = self._function(target.method, ", ".join(target.parameters))
        statements = method.body[1:] if ast.get_docstring(method) is not None else method.body
        if len(statements) != 2 or not all(isinstance(statement, ast.If) for statement in statements):
            self._refuse(method, f"expected the reduce and the growth, found {len(statements)} statements")
        self.reduce, growth = statements[0], statements[1]
        local = self._require_reduce(self.reduce, *target.parameters[1:])
        self._require_growth(growth, target.parameters[1], local)
        if target.setter:
            self._require_no_names(self._function(target.setter, "self, max_audio_length"), _COLLECTIVES)
        for node in ast.walk(tree):
            names = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr
            if names in (target.method, target.setter):
                self._refuse(node, f"expected no other {names}, found that `{ast.unparse(node)}` is set")
        self.import_after = self._place_of_import()

    def require_nothing_else(self, edited: str) -> None:
        """Refuse an edited text that differs from the program in more than the edit."""
        try:
            tree = ast.parse(edited)
            compile(tree, self._path, "exec", dont_inherit=True)
        except SyntaxError:
            # Of the three places the import's alone can be amid a line that goes on, by a backslash.
            self._refuse(ast.Pass(lineno=self.import_after), "with our import after this line it would not be Python")
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.ImportFrom) and ast.unparse(node) == _IMPORT)
        ]
        owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == self._target.owner)
        ours = owner.decorator_list.pop()
        assert isinstance(self.reduce, ast.stmt)
        method = next(node for node in self.owner.body if getattr(node, "name", "") == self._target.method)
        assert isinstance(method, ast.FunctionDef)
        place = method.body.index(self.reduce)
        method.body.remove(self.reduce)
        same = ast.dump(tree) == ast.dump(self._tree) and ast.unparse(ours).startswith("bounded_length_sync(")
        method.body.insert(place, self.reduce)
        if not same:
            self._refuse(self.owner, "the edit would change more than the reduce")

    def _require_reduce(self, node: ast.stmt, length: str, device: str) -> str:
        """The name of its local variable."""
        assert isinstance(node, ast.If)
        flag, distributed = "sync_max_audio_length", "torch.distributed.is_initialized()"
        tests = [f"self.{flag} and {distributed}"]
        if not any(isinstance(inner, ast.Attribute) and inner.attr == flag for inner in ast.walk(self.owner)):
            tests.append(distributed)  # a class that has the flag must heed it: bounded_length_sync does
        if ast.unparse(node.test) not in tests or node.orelse:
            found = ast.unparse(node.test) + "` with an `else" * bool(node.orelse)
            self._refuse(node, f"expected `if {'` or `if '.join(tests)}`, found `if {found}`")
        first = node.body[0]
        name = first.targets[0].id if isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Name) else "?"
        expected = [
            f"{name} = torch.tensor([{length}], dtype=torch.float32, device={device})",
            f"torch.distributed.all_reduce({name}, op=torch.distributed.ReduceOp.MAX)",
            f"{length} = {name}.int().item()",
        ]
        texts = [ast.unparse(statement) for statement in node.body]
        for statement, text, wanted in zip(node.body, texts, expected, strict=False):
            if text != wanted:
                self._refuse(statement, f"expected `{wanted}`, found `{text}`")
        if len(texts) != len(expected):
            self._refuse(node, f"expected a reduce of {len(expected)} statements, found {len(texts)}")
        return name

    def _require_growth(self, node: ast.stmt, length: str, local: str) -> None:
        assert isinstance(node, ast.If)
        if ast.unparse(node.test) != f"{length} > self.max_audio_length" or node.orelse:
            self._refuse(node, f"expected `if {length} > self.max_audio_length`, found `if {ast.unparse(node.test)}`")
        found = "; ".join(ast.unparse(statement) for statement in node.body)
        if self._target.setter and found != f"self.{self._target.setter}({length})":
            self._refuse(node.body[0], f"expected `self.{self._target.setter}({length})`, found `{found}`")
        self._require_no_names(node, _COLLECTIVES | {local} - {length})  # the local goes with the reduce

    def _require_no_names(self, where: ast.stmt, names: set[str]) -> None:
        """Ranks no longer grow their buffers at the same call: another collective there would hang."""
        for node in ast.walk(where):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in names:
                self._refuse(node, f"expected no {name} in what grows the buffers, found `{ast.unparse(node)}`")

    def _place_of_import(self) -> int:
        """After how many lines: where isort would have it among NeMo's own imports."""
        imports = [node for node in self._tree.body if isinstance(node, ast.ImportFrom) and node.level == 0]
        # Those after the class would come too late for its decorator.
        imports = [node for node in imports if node.lineno < self.owner.lineno]
        own = [node for node in imports if (node.module or "").startswith("nemo.")]
        if not own:
            self._refuse(self.owner, "found no import of NeMo's own before the class to put ours beside")
        before = [node for node in own if (node.module or "") < VENDORED]
        beside = before[-1] if before else own[0]
        first, last = beside.lineno, int(beside.end_lineno or 0)
        if sum(node.lineno <= last and first <= int(node.end_lineno or 0) for node in self._tree.body) > 1:
            self._refuse(beside, "expected an import of NeMo's own on a line of its own, found more on the line")
        return last if before else first - 1

    def _function(self, name: str, arguments: str) -> ast.FunctionDef:
        """The class's own function, with these arguments and without a decorator."""
        function: ast.FunctionDef = self._one(ast.FunctionDef, name, self.owner)
        self._require(function, "arguments", ast.unparse(function.args).replace(": int", ""), arguments)
        self._require(function, "decorators", str([ast.unparse(node) for node in function.decorator_list]), "[]")
        return function

    def _one(self, kind: type, name: str, where: ast.Module | ast.ClassDef):  # type: ignore[no-untyped-def]
        found = _bound(name, where)
        if len(found) != 1 or not isinstance(found[0], kind) or found[0] not in where.body:
            place = found[-1] if found else where if isinstance(where, ast.ClassDef) else ast.Pass(lineno=1)
            kinds = [type(node).__name__ for node in found]
            self._refuse(place, f"expected one {name}, and that inside no `if` or `try`, found {kinds}")
        return found[0]

    def _require(self, node: ast.stmt, what: str, found: str, expected: str) -> None:
        if found != expected:
            self._refuse(node, f"{what} of {getattr(node, 'name', '')}: expected ({expected}), found ({found})")

    def _refuse(self, node: ast.AST, text: str) -> None:
        raise DiffError(f"{self._path}:{getattr(node, 'lineno', 1)}: {self._target}: {text}")


def _bound(name: str, where: ast.Module | ast.ClassDef) -> list[ast.AST]:
    """All that gives a name its value in a module or a class, also inside `if` and the like, by line."""
    found: list[ast.AST] = []
    rest: list[ast.AST] = list(where.body)
    while rest:
        node = rest.pop()
        given = getattr(node, "asname", None) or getattr(node, "name", "")
        if given == name or (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)):
            found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            rest.extend(ast.iter_child_nodes(node))
    return sorted(found, key=lambda node: getattr(node, "lineno", 0))
