"""The parts of the patch, each with its own diff: nemo, the edit of NeMo's files; sync and stall, our folders.

NeMo's edited files call sync, so nemo needs it; it brings growth.py, text.py and channel/, on which it stands. stall
(who is missing?) is optional, and needs sync too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring.edit import VENDORED, edited, path_of
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.git import Files

FOLDER = VENDORED.replace(".", "/")  # our package's place in a checkout
_PACKAGE = Path(__file__).parent.parent


class Part(Enum):
    """The parts that can be applied or removed separately, in the order in which they are named."""

    NEMO = "nemo"
    SYNC = "sync"
    STALL = "stall"


Parts = frozenset[Part]
ALL: Parts = frozenset(Part)
FOLDERS = {Part.SYNC: ("channel", "sync"), Part.STALL: ("stall",)}  # of ours, by the part that brings them
# Files beside them, and which of ours each is.
_ALONE = {Part.SYNC: {"__init__.py": "vendoring/vendored_package.py", "growth.py": "growth.py", "text.py": "text.py"}}
PLACES = (FOLDER, *(f"{FOLDER}/{name}" for names in FOLDERS.values() for name in names))  # the outer one first
NEEDED = {Part.NEMO: Part.SYNC, Part.STALL: Part.SYNC}  # the part that another one needs


@dataclass(frozen=True)
class Edit:
    """One file of a checkout. `before` is None for a file that is new."""

    path: str  # from the checkout's root, with slashes
    before: bytes | None
    after: bytes


def parse(text: str) -> Parts:
    """`nemo,sync` as parts. Raises DiffError."""
    words = [word.strip() for word in text.split(",")]
    allowed = [part.value for part in Part]
    for word in words:
        if word not in allowed:
            raise DiffError(f"--parts: found {word!r}; allowed are {named(ALL)}, several of them with commas")
    return frozenset(map(Part, words))


def named(parts: Iterable[Part]) -> str:
    """The parts as text in a sentence."""
    *others, last = (part.value for part in Part if part in frozenset(parts))
    return f"{', '.join(others)} and {last}" if others else last


def part_of(path: str) -> Part:
    """The part that a file of a checkout belongs to; other files in our folder count as sync."""
    if not path.startswith(f"{FOLDER}/"):
        return Part.NEMO
    return Part.STALL if path.startswith(f"{FOLDER}/stall/") else Part.SYNC


def own_files(part: Part) -> dict[str, bytes]:
    """The files that a part brings, by the paths that they have in a checkout: this nemo_patches', as they are."""
    if part is Part.NEMO:
        return {}
    sources = {
        f"{FOLDER}/{name}/{file.name}": file
        for name in FOLDERS[part]
        for file in sorted((_PACKAGE / name).glob("*.py"))
    }
    sources |= {f"{FOLDER}/{name}": _PACKAGE / file for name, file in _ALONE.get(part, {}).items()}
    return {path: file.read_bytes() for path, file in sources.items()}


def edits_of(files: Files, parts: Parts) -> list[Edit]:
    """What these parts change in a checkout with these files, by path. Raises DiffError."""
    edits = [Edit(path, None, content) for part in parts for path, content in own_files(part).items()]
    if Part.NEMO in parts:
        for target in TARGETS:
            if (path := path_of(target)) in files:
                edits.append(Edit(path, files[path], edited(files[path], target)))
    return sorted(edits, key=lambda edit: edit.path)
