"""A NeMo checkout as `nemo-patches diff` finds it, and its files replaced: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_patches import sync as runtime
from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import diffs
from nemo_patches.vendoring.diffs import FOLDER, DiffError

Files = Mapping[str, bytes]  # by path from the checkout's root, with slashes
PATHS = (*map(diffs.path_of, TARGETS), FOLDER)  # all that a diff may be about


@dataclass(frozen=True)
class State:
    """What of the patch is in a checkout. As text, it says so in a sentence."""

    having: tuple[str, ...]  # the files that use the bounded sync, and the folder of the vendored runtime
    lacking: tuple[str, ...]  # those of them that are not so
    version: str  # of the nemo_patches that the vendored runtime is from; empty where it does not say
    foreign: tuple[str, ...]  # the runtime's files that are not as this nemo_patches has them

    @property
    def stock(self) -> bool:
        """Whether nothing of the patch is in."""
        return not self.having

    @property
    def complete(self) -> bool:
        """Whether the patch is in, whole, and this nemo_patches' own."""
        return bool(self.having) and not self.lacking and not self.foreign

    def __str__(self) -> str:
        if self.stock:
            return "not patched"
        if self.lacking:
            said = f"partly patched: {', '.join(self.having)} have it, {', '.join(self.lacking)} lack it"
        else:
            said = f"patched already, by nemo_patches {self.version or '(it does not say which)'}"
        if self.foreign:
            said += f"; in {FOLDER} this is not nemo_patches {runtime.__version__}'s: {', '.join(self.foreign)}"
        return said


def state_of(files: Files) -> State:
    """What of the patch is in these files of a checkout. Raises DiffError for one that Python would not take."""
    ours = diffs.runtime_files()
    vendored = {path: content for path, content in files.items() if path.startswith(f"{FOLDER}/")}
    users = {path: _uses_it(content, path) for path, content in files.items() if path not in vendored}
    having = [path for path, uses in users.items() if uses] + [FOLDER] * bool(vendored)
    lacking = [path for path, uses in users.items() if not uses] + [FOLDER] * (not vendored)
    init = f"{FOLDER}/__init__.py"
    version = diffs.constants(vendored[init], init).get("__version__", "") if init in vendored else ""
    foreign = [path for path in sorted(vendored) if vendored[path] != ours.get(path)]
    if vendored:  # another version's runtime may well have other files
        (lacking if version in (runtime.__version__, "") else foreign).extend(sorted(ours.keys() - vendored.keys()))
    names = tuple(path.removeprefix(f"{FOLDER}/") for path in foreign)
    return State(tuple(having), tuple(lacking) if having else (), version, names)


def uncommitted(checkout: Path) -> str:
    """Which of the files that a diff is about have uncommitted changes, in a sentence; empty where there are none.

    That git cannot tell, in a repository, is said too. Raises DiffError.
    """
    done = _git(checkout, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--", *PATHS)
    if done.returncode:
        problem = diffs.complaint(done.stderr)
        return "" if "not a git repository" in problem else f"uncommitted changes cannot be told: {problem}"
    # Porcelain paths are from the repository's root, -z or not, and the checkout may lie below it.
    prefix = _git(checkout, "rev-parse", "--show-prefix").stdout.rstrip(b"\n")
    names = [os.fsdecode(line[3:].removeprefix(prefix)) for line in done.stdout.split(b"\0") if line]
    return f"uncommitted changes in {', '.join(names)}" if names else ""


def at_head(checkout: Path, paths: Iterable[str]) -> Files:
    """These files as the last commit has them and git would check them out; empty where not every one is in it."""
    found = {}
    for path in paths:
        done = _git(checkout, "cat-file", "--filters", f"HEAD:./{path}")
        if done.returncode:
            return {}
        found[path] = done.stdout
    return found


def require_no_links(checkout: Path, files: Iterable[str] = ()) -> None:
    """Raise DiffError where one of PATHS or of these files leads over a symbolic link: another place would be changed.

    The checkout itself may be reached by one.
    """
    for path in (*PATHS, *files):
        for part in (Path(path), *Path(path).parents):
            if part != Path() and (checkout / part).is_symlink():
                where = os.readlink(checkout / part)
                raise DiffError(
                    f"{checkout / part} is a symbolic link to {where}; only files that are its own are changed"
                )


def replace(checkout: Path, before: Files, after: Files) -> None:
    """Make the files of a checkout that are as in `before` those of `after`: all of them or, with DiffError, none.

    Each new content is written beside its file and then takes its name, so a reader finds one or the other, and a file
    that is a hard link, as of uv's cache, stops being one. Modes stay.
    """
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    changed.sort(key=lambda path: (path in before, path not in after, path))  # no encoder is without its runtime
    require_no_links(checkout, changed)
    had_folder = (checkout / FOLDER).exists()
    staged: dict[str, Path] = {}
    done: list[str] = []
    try:
        for path in changed:
            _require_replaceable(checkout / path, before.get(path))
            if path in after:
                (checkout / path).parent.mkdir(parents=True, exist_ok=True)
                new = (checkout / path).with_name(f".{Path(path).name}.nemo_patches-{os.getpid()}")
                with new.open("xb") as file:
                    staged[path] = new
                    file.write(after[path])
                if path in before:
                    shutil.copymode(checkout / path, staged[path])
        for path in changed:
            done.append(path)
            if path in after:
                staged[path].replace(checkout / path)
            else:
                (checkout / path).unlink()
            if _content(checkout / path) != after.get(path):
                raise DiffError(f"{checkout / path} is not what was written")
    except BaseException as error:  # also Ctrl-C
        _put_back(checkout, before, done)
        if isinstance(error, OSError):
            raise DiffError(f"{error.filename or checkout}: {error.strerror}; nothing was changed") from error
        raise
    finally:
        for new in staged.values():
            new.unlink(missing_ok=True)
        if not had_folder:
            _remove_empty(checkout)
    _remove_empty(checkout)


def _remove_empty(checkout: Path) -> None:
    """Remove the vendored runtime's folder, with Python's cache, where the runtime is not in it."""
    folder = checkout / FOLDER
    if folder.is_dir() and not any(folder.glob("*.py")):
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):  # what else is in it is somebody's
            folder.rmdir()


def _require_replaceable(file: Path, content: bytes | None) -> None:
    """Raises DiffError, and OSError where it cannot be read."""
    if _content(file) != content:
        raise DiffError(f"{file} has changed meanwhile; nothing was changed")
    for place in (file, file.parent) if content is not None else ():
        if not os.access(place, os.W_OK):
            raise DiffError(f"{place} is read-only; nothing was changed")


def _put_back(checkout: Path, before: Files, paths: Iterable[str]) -> None:
    """Raises DiffError with the files that it could not put back."""
    left = []
    for path in paths:
        try:
            if path not in before:
                (checkout / path).unlink(missing_ok=True)
            elif _content(checkout / path) != before[path]:  # then it is one that was put there
                (checkout / path).write_bytes(before[path])
        except OSError as error:
            left.append(f"{error.filename}: {error.strerror}")
    if left:
        raise DiffError(f"half done, and not to be put back: {'; '.join(left)}")


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _uses_it(source: bytes, path: str) -> bool:
    try:
        return "bounded_length_sync" in compile(source, path, "exec", dont_inherit=True).co_names
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DiffError(f"{path}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}") from error


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """git in the repository that a checkout is in, with the user's configuration: it says how files are checked out.

    Raises DiffError where git is not there or does not end in time.
    """
    # Inside a hook, git's variables name the repository of that hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG")}
    # A status writes no index, and starts no watcher of the file system that would outlive it.
    git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "--literal-pathspecs"]
    try:
        return subprocess.run(
            [*git, *arguments],
            cwd=checkout,
            env=variables | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=diffs.GIT_LIMIT.total_seconds(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiffError(f"git {arguments[0]}: {error}") from None
