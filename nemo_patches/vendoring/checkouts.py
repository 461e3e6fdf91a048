"""A NeMo checkout as `nemo-patches diff` sees it:
its version, and the files that the edit is about.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.patching.targets import BOUNDED_SYNC
from nemo_patches.vendoring.edit import edited, left_in
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.git import Files
from nemo_patches.vendoring.tables import READS, REDUCES, TABLES

# A checkout of nemo_patches has a link there.
DIFFS = Path(__file__).parent.parent / "patches"
NEW_FILE = BOUNDED_SYNC.replace(".", "/") + ".py"
PATHS = tuple(dict.fromkeys([*(one.path for one in (*REDUCES, *TABLES)), NEW_FILE]))
# Beside NeMo's own, what a repository has: not an environment's packages.
_OF_REPOSITORY = (".git", "pyproject.toml", "setup.py")


@dataclass(frozen=True)
class Edit:
    """One file of a checkout. `before` is None for the file that is new."""

    path: str  # from the checkout's root, with slashes
    before: bytes | None
    after: bytes


@dataclass(frozen=True)
class Checkout:
    """A folder with `nemo/`, as it was read: a repository, a part of one, or an installation's
    site-packages.
    """

    folder: Path
    version: str  # NeMo's
    files: Files  # those of PATHS that are here

    def require_stock(self) -> None:
        """Raise DiffError if the edit is here already."""
        if NEW_FILE in self.files:
            text = (
                f"{self.folder}: the edit is here already ({NEW_FILE}); take it out as"
            )
            text += " it was put in: git apply -R FILE"
            raise DiffError("; ".join([text, *self.left({})]))

    def edits(self) -> list[Edit]:
        """What the edit changes here, by path. Raises DiffError."""
        self.require_stock()
        if not self.files.keys() & {one.path for one in REDUCES}:
            raise DiffError(
                f"{self.folder}: none of the files with a length sync is here"
            )
        for path, table in READS.items():
            if path in self.files and table not in self.files:
                text = f"{path} reads the table in {table}, which is not here"
                raise DiffError(f"{self.folder}: {text}: it would stay a buffer")
        edits = [
            Edit(path, before, edited(before, path))
            for path, before in sorted(self.files.items())
        ]
        new_file = Edit(NEW_FILE, None, _new_file())
        return sorted([*edits, new_file], key=lambda edit: edit.path)

    def left(self, after: Files) -> list[str]:
        """Sentences about length syncs here that wait without a limit, with file and line.

        after: files as the edit makes them.
        """
        is_repository = any((self.folder / name).exists() for name in _OF_REPOSITORY)
        found: list[str] = []
        for file in sorted(
            (self.folder / ("" if is_repository else "nemo")).rglob("*.py")
        ):
            path = file.relative_to(self.folder).as_posix()
            with contextlib.suppress(OSError):
                found += left_in(after.get(path) or file.read_bytes(), path)
        return [f"not bounded: {place}" for place in found]


def read(folder: Path) -> Checkout:
    """Read a checkout without running NeMo. Raises DiffError if there is none, or a file cannot be
    read.
    """
    version = _version_of(folder)
    files = {}
    try:
        for path in PATHS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files[path] = (folder / path).read_bytes()
    except OSError as error:
        raise DiffError(f"{error.filename}: {error.strerror}") from None
    return Checkout(folder, version, files)


def _new_file() -> bytes:
    file = DIFFS / Path(NEW_FILE).name
    try:
        return file.read_bytes()
    except OSError:
        text = "this copy of nemo_patches has no patches/ with it; a checkout of it has"
        raise DiffError(text) from None


def _version_of(folder: Path) -> str:
    """The version in nemo/package_info.py, read without running it."""
    file = folder / "nemo" / "package_info.py"
    try:
        source = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        needed = "needed is the folder that has nemo/package_info.py"
        raise DiffError(
            f"{folder}: no NeMo here ({error.strerror}); {needed}"
        ) from None
    numbers = re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", source, re.MULTILINE)
    pre_release = re.search(r"""^PRE_RELEASE = ['"](\w*)['"]$""", source, re.MULTILINE)
    if [name for name, _ in numbers] != ["MAJOR", "MINOR", "PATCH"] or not pre_release:
        raise DiffError(
            f"{file}: found no MAJOR, MINOR, PATCH and PRE_RELEASE, which NeMo has there"
        )
    return ".".join(number for _, number in numbers) + pre_release[1]
