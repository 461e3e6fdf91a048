"""The monkeypatch's edit as a unified diff of any NeMo checkout: found in the syntax tree, made in the text.

Each target class loses its reduce and gets one decorator, `bounded_length_sync`; the runtime's files come along. What
is not exactly what is known is refused, and every edit is checked against the syntax tree before it is shown.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import subprocess
import tempfile
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from nemo_patches import sync as runtime
from nemo_patches.patching.targets import TARGETS, Target

VENDORED = "nemo.collections.asr.parts.nemo_patches"
FOLDER = VENDORED.replace(".", "/")  # the same as a path in a checkout
GIT_LIMIT = timedelta(seconds=60)  # for each git that is started
_LAST_UPDATE = "2026-11-21"  # of what the diffs do to NeMo; a date of today would not be reproducible
_IMPORT = f"from {VENDORED}.encoder_methods import bounded_length_sync"
_IN_ITS_PLACE = (
    "# nemo_patches: it is the largest of all ranks already, agreed on in bounded time (bounded_length_sync)"
)
_COLLECTIVES = {"distributed", "dist", "all_reduce", "all_gather", "broadcast", "barrier"}


class DiffError(Exception):
    """No diff can be made. The text says what was found, and where."""


@dataclass(frozen=True)
class Edit:
    """One file of a checkout. `before` is None for a file that is new."""

    path: str  # from the checkout's root, with slashes
    before: bytes | None
    after: bytes


def edits(checkout: Path) -> list[Edit]:
    """What to change in a checkout (the folder that has `nemo/`, or site-packages). Only reads; raises DiffError."""
    version_of(checkout)  # it is one
    files = present(checkout)
    if any(path.startswith(f"{FOLDER}/") for path in files):
        raise DiffError(f"{checkout / FOLDER} is there already: this NeMo has been patched")
    if not files:
        raise DiffError(f"{checkout}: none of the files with a length sync is here")
    return edits_of(files)


def present(checkout: Path) -> dict[str, bytes]:
    """The files of a checkout that are the patch's business, by path: those with a length sync, and a vendored runtime.

    Raises DiffError for one that is there and cannot be read.
    """
    files = {}
    try:
        for target in TARGETS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files[path_of(target)] = (checkout / path_of(target)).read_bytes()
        names = []  # Python's cache, which outlives a reversed patch, is no runtime
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(checkout / FOLDER) if name.endswith(".py")]
        for name in sorted(names):
            files[f"{FOLDER}/{name}"] = (checkout / FOLDER / name).read_bytes()
    except OSError as error:
        raise DiffError(f"{error.filename}: {error.strerror}") from None
    return files


def path_of(target: Target) -> str:
    """Where a checkout has a target's file, from its root, with slashes."""
    return target.module.replace(".", "/") + ".py"


def edits_of(files: Mapping[str, bytes]) -> list[Edit]:
    """What to change in these files, of which the targets' are looked at. Raises DiffError."""
    found = [Edit(path, None, content) for path, content in runtime_files().items()]
    for target in TARGETS:
        path = path_of(target)
        if path in files:
            try:
                found.append(Edit(path, files[path], _edited(files[path], target, path)))
            except RecursionError:  # what Python compiles may still be too deep for ast.dump
                raise DiffError(f"{path}:1: {target}: found an expression too deep to compare") from None
    return sorted(found, key=lambda edit: edit.path)


def runtime_files() -> dict[str, bytes]:
    """This nemo_patches' runtime, by the paths that it has in a checkout."""
    place = Path(next(iter(runtime.__path__)))
    return {f"{FOLDER}/{file.name}": file.read_bytes() for file in sorted(place.glob("*.py"))}


def unified(found: Sequence[Edit]) -> str:
    """The edits as git prints them."""
    with tempfile.TemporaryDirectory() as folder:
        clean_git(folder, "init", "-q", "--template=")
        write(Path(folder), {edit.path: edit.before for edit in found if edit.before is not None})
        clean_git(folder, "add", ".")
        write(Path(folder), {edit.path: edit.after for edit in found})
        clean_git(folder, "add", "-N", ".")
        options = ("--no-ext-diff", "--no-color", "--no-renames", "--full-index", "--src-prefix=a/", "--dst-prefix=b/")
        return clean_git(folder, "diff", *options).decode("utf-8", "surrogateescape")


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their paths in a folder. Raises OSError."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def clean_git(folder: str, *arguments: str, given: bytes = b"") -> bytes:
    """What git prints in a folder that is, or becomes, a repository of its own. Raises DiffError with git's first line.

    Nobody's configuration, attributes, variables or surrounding repository has a say in it.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Under an empty HOME there is no configuration and no attributes file, for every version of git.
    clean |= {"HOME": f"{folder}/.git", "XDG_CONFIG_HOME": f"{folder}/.git", "GIT_DIR": f"{folder}/.git"}
    clean |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C"}
    git = ["git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.quotepath=false"]
    try:
        done = subprocess.run(
            [*git, *arguments],
            cwd=folder,
            env=clean,
            input=given,
            capture_output=True,
            timeout=GIT_LIMIT.total_seconds(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiffError(f"git {arguments[0]}: {error}") from None
    if done.returncode:
        raise DiffError(f"git {arguments[0]}: {complaint(done.stderr)}")
    return done.stdout


def complaint(stderr: bytes) -> str:
    """The line by which git says what is wrong; it may say other things before it."""
    lines = stderr.decode(errors="replace").splitlines() or ["failed, and did not say why"]
    return next((line for line in lines if line.startswith(("error:", "fatal:"))), lines[0])


def header(version: str) -> str:
    """What a reader sees first: DEP-3 fields (dep-team.debian.net/deps/dep3), and how to apply it and take it back."""
    series = ".".join(version.split(".")[:2])
    return f"""\
Description: the encoders' length sync, bounded in time
 Training on several ranks hangs in an all-reduce of one number, without a time limit, that waits for a rank which is
 late or gone. With this, a rank waits for it at most NEMO_PATCHES_TIMEOUT seconds (10), goes on with its own length and
 says so, with who is missing and where that rank is. Buffers that depend on the length grow for each process alone, so
 that DDP never mixes them. No number that a model computes changes.
 .
 The files under {FOLDER}/ are the runtime of nemo_patches {runtime.__version__}, as they are; they
 need torch and the standard library. Settings: NEMO_PATCHES_SYNC, NEMO_PATCHES_TIMEOUT, NEMO_PATCHES_ON_TIMEOUT and
 NEMO_PATCHES_CALL_TIMEOUT, as in nemo_patches' README.
 .
 Apply: git apply FILE, or patch -p1 < FILE. Undo: git apply -R FILE, or patch -p1 -R < FILE.
 On an installed NeMo: patch -p1 < FILE in the site-packages folder.
Origin: other, nemo_patches {runtime.__version__}, by `nemo-patches diff` from NeMo {version}
Forwarded: no
Last-Update: {_LAST_UPDATE}
Applies-To: NeMo {series}
---
"""


def version_of(checkout: Path) -> str:
    """The version in a checkout's nemo/package_info.py, read and not run. Raises DiffError."""
    file = checkout / "nemo" / "package_info.py"
    try:
        found = constants(file.read_bytes(), str(file))
    except OSError as error:
        needed = "needed is the folder that has nemo/package_info.py"
        raise DiffError(f"{checkout}: no NeMo here ({error.strerror}); {needed}") from None
    try:
        return ".".join(found[name] for name in ("MAJOR", "MINOR", "PATCH")) + found["PRE_RELEASE"]
    except KeyError as error:
        raise DiffError(f"{file}: found no {error}") from None


def constants(source: bytes, path: str) -> dict[str, str]:
    """The constants of a module, read and not run. Raises DiffError where Python would not take it."""
    _, _, tree = _read(source, path)
    return {
        node.targets[0].id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str | int)
    }


@lru_cache(maxsize=32)  # what is taken out is edited again, to see whether it gives the same
def _edited(source: bytes, target: Target, path: str) -> bytes:
    """The file with the target's edit. Raises DiffError, with the place, where the code is not what is known."""
    encoding, text, tree = _read(source, path)
    lines = list(io.StringIO(text, newline=""))
    for number, line in enumerate(lines, 1):
        if "bounded_length_sync" in line:
            raise DiffError(f"{path}:{number}: {target}: found bounded_length_sync, a name that the edit brings")
    known = _Known(tree, target, path)
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
    edited = "".join(lines)
    known.check(edited)
    return edited.encode(encoding)


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


class _Known:
    """A target's code in a file's syntax tree, found exactly as it is known; raises DiffError where it is not."""

    def __init__(self, tree: ast.Module, target: Target, path: str) -> None:
        self._tree, self._target, self._path = tree, target, path
        self.owner = self._one(ast.ClassDef, target.owner, tree)
        method = self._one(ast.FunctionDef, target.method, self.owner)
        self._require(method, "arguments", ast.unparse(method.args).replace(": int", ""), ", ".join(target.parameters))
        self._require(method, "decorators", str([ast.unparse(node) for node in method.decorator_list]), "[]")
        statements = method.body[1:] if ast.get_docstring(method) is not None else method.body
        if len(statements) != 2 or not all(isinstance(statement, ast.If) for statement in statements):
            self._refuse(method, f"expected the reduce and the growth, found {len(statements)} statements")
        self.reduce, growth = statements[0], statements[1]
        local = self._require_reduce(self.reduce, *target.parameters[1:])
        self._require_growth(growth, target.parameters[1], local)
        if target.setter:
            setter = self._one(ast.FunctionDef, target.setter, self.owner)
            self._require(setter, "arguments", ast.unparse(setter.args).replace(": int", ""), "self, max_audio_length")
            self._require(setter, "decorators", str([ast.unparse(node) for node in setter.decorator_list]), "[]")
            self._require_no_names(setter, _COLLECTIVES)
        for node in ast.walk(tree):
            names = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr
            if names in (target.method, target.setter):
                self._refuse(node, f"expected no other {names}, found that `{ast.unparse(node)}` is set")
        self.import_after = self._place_of_import()

    def check(self, edited: str) -> None:
        """Whether the edited text is the same program but for the edit: an edit that is not is never given out."""
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
        """Not every rank grows its buffers at the same call any more: another collective there would hang."""
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
