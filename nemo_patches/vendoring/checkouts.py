"""A NeMo checkout as `nemo-patches diff` sees it: its version, the files of the patch, and the applied parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemo_patches.patching.targets import TARGETS
from nemo_patches.sync import __version__
from nemo_patches.vendoring import git, parts
from nemo_patches.vendoring.edit import constants, is_edited, path_of
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.git import Files
from nemo_patches.vendoring.parts import ALL, FOLDER, NEEDED, PLACES, Edit, Part, Parts

PATHS = (*map(path_of, TARGETS), *PLACES)  # all that a diff may be about


@dataclass(frozen=True)
class State:
    """The parts of the patch that a checkout has; as text, in a sentence."""

    parts: Parts  # including parts that are only partly applied
    having: tuple[str, ...]  # the files that use the bounded sync, and our folders
    lacking: tuple[str, ...]  # if the patch is only partly applied: what is missing
    version: str  # of the nemo_patches that sync is from; empty if unknown
    foreign: tuple[str, ...]  # the files in our folder that differ from this nemo_patches
    flat: bool  # applied by an earlier nemo_patches, with all files in our folder itself

    @property
    def stock(self) -> bool:
        """Whether no part of the patch is applied."""
        return not self.having

    @property
    def sound(self) -> bool:
        """Whether each part is applied completely, unchanged and with what it needs, or not at all."""
        return not self.lacking and not self.foreign

    def __str__(self) -> str:
        version = self.version or "(it does not say which)"
        if self.stock:
            return "not patched"
        if self.flat:
            text = f"patched by an earlier nemo_patches, {version}, which had all its files in {FOLDER} itself"
            return f"{text}; take it out with the diff that was applied: git apply -R FILE"
        if self.lacking:
            text = f"partly patched: {', '.join(self.having)} have it, {', '.join(self.lacking)} lack it"
        elif self.parts == ALL:
            text = f"patched already, by nemo_patches {version}"
        else:
            text = f"in: {parts.named(self.parts)}, of nemo_patches {version}; not in: {parts.named(ALL - self.parts)}"
        if self.foreign:
            text += f"; in {FOLDER} this is not nemo_patches {__version__}'s: {', '.join(self.foreign)}"
        return text


@dataclass(frozen=True)
class Checkout:
    """A folder with `nemo/`, as it was read: a repository, a part of one, or an installation's site-packages."""

    folder: Path
    version: str  # NeMo's
    files: Files  # those with a length sync, and those in our folder

    @cached_property
    def state(self) -> State:
        """Raises DiffError for a file that Python does not accept."""
        return _state_of(self.files)

    def edits(self, chosen: Parts = ALL) -> list[Edit]:
        """The changes of these parts of the patch here. Raises DiffError."""
        if Part.NEMO in chosen and not any(parts.part_of(path) is Part.NEMO for path in self.files):
            raise DiffError(f"{self.folder}: none of the files with a length sync is here")
        return parts.edits_of(self.files, chosen)


def read(folder: Path) -> Checkout:
    """Read a checkout without running NeMo. Raises DiffError if there is none, or a file cannot be read."""
    version = _version_of(folder)
    files = {}
    try:
        for path in (*map(path_of, TARGETS), *_vendored(folder)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files[path] = (folder / path).read_bytes()
    except OSError as error:
        raise DiffError(f"{error.filename}: {error.strerror}") from None
    return Checkout(folder, version, files)


def uncommitted(checkout: Checkout) -> str:
    """Which of the files that a diff is about have uncommitted changes, in a sentence; empty where there are none.

    Empty for a patched checkout, whose changes are the patch. That git cannot tell, in a repository, is said too.
    Raises DiffError.
    """
    if not checkout.state.stock:
        return ""
    options = ("--porcelain", "-z", "--no-renames", "--untracked-files=no")
    done = git.ask(checkout.folder, "status", *options, "--", *PATHS)
    if done.returncode:
        problem = git.complaint(done.stderr)
        return "" if "not a git repository" in problem else f"uncommitted changes cannot be told: {problem}"
    # Porcelain paths are from the repository's root, -z or not, and the checkout may lie below it.
    prefix = git.ask(checkout.folder, "rev-parse", "--show-prefix").stdout.rstrip(b"\n")
    names = [os.fsdecode(line[3:].removeprefix(prefix)) for line in done.stdout.split(b"\0") if line]
    return f"uncommitted changes in {', '.join(names)}" if names else ""


def at_head(folder: Path, paths: Iterable[str]) -> Files:
    """These files as the last commit has them and git would check them out; empty where not every one is in it."""
    files = {}
    for path in paths:
        done = git.ask(folder, "cat-file", "--filters", f"HEAD:./{path}")
        if done.returncode:
            return {}
        files[path] = done.stdout
    return files


def _version_of(folder: Path) -> str:
    """The version in nemo/package_info.py."""
    file = folder / "nemo" / "package_info.py"
    try:
        values = constants(file.read_bytes(), str(file))
    except OSError as error:
        needed = "needed is the folder that has nemo/package_info.py"
        raise DiffError(f"{folder}: no NeMo here ({error.strerror}); {needed}") from None
    try:
        return ".".join(values[name] for name in ("MAJOR", "MINOR", "PATCH")) + values["PRE_RELEASE"]
    except KeyError as error:
        raise DiffError(f"{file}: found no {error}") from None


def _vendored(folder: Path) -> list[str]:
    """The Python files in our folder. Python's cache, which outlives a patch that is taken out, is none of it."""
    paths: list[str] = []
    for place in PLACES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths += [f"{place}/{name}" for name in sorted(os.listdir(folder / place)) if name.endswith(".py")]
    return paths


def _state_of(files: Files) -> State:
    encoders = {path: is_edited(files[path], path) for path in files if parts.part_of(path) is Part.NEMO}
    vendored = {path: content for path, content in files.items() if path not in encoders}
    in_ = {parts.part_of(path) for path in vendored} | {Part.NEMO for edited in encoders.values() if edited}
    flat = f"{FOLDER}/encoder_methods.py" in vendored
    marker = f"{FOLDER}/__init__.py" if flat else f"{FOLDER}/sync/__init__.py"
    version = constants(vendored[marker], marker).get("__version__", "") if marker in vendored else ""

    own = {path: content for part in in_ for path, content in parts.own_files(part).items()}
    foreign = [path for path in vendored if vendored[path] != own.get(path)]
    lacking = [f"{FOLDER}/{NEEDED[part].value}" for part in in_ if part in NEEDED and NEEDED[part] not in in_]
    # Another version may well have other files.
    (lacking if version in (__version__, "") else foreign).extend(own.keys() - vendored.keys())
    unedited = [path for path, edited in encoders.items() if not edited]
    if lacking or (Part.NEMO in in_ and unedited):
        lacking = unedited + sorted(set(lacking))
    having = [path for path, edited in encoders.items() if edited]
    having += [f"{FOLDER}/{part.value}" for part in (Part.SYNC, Part.STALL) if part in in_]
    names = tuple(path.removeprefix(f"{FOLDER}/") for path in sorted(foreign))
    return State(frozenset(in_), tuple(having), tuple(lacking), version, names, flat)
