"""NeMo's own files of a patched checkout without the edit: from the last commit, or by a committed diff reversed."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_patches.vendoring import checkouts, diffs, git, parts
from nemo_patches.vendoring.checkouts import Checkout
from nemo_patches.vendoring.diffs import Committed
from nemo_patches.vendoring.edit import is_edited
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.git import Files
from nemo_patches.vendoring.parts import Part


@dataclass(frozen=True)
class WayBack:
    """NeMo's files without the edit, and where they are from."""

    origin: str
    files: Files


def find(checkout: Checkout, patched: Files) -> WayBack:
    """The way back from these NeMo files, with the edit in all or some of them. Raises DiffError.

    Only what becomes exactly these files when it is edited again is taken for it.
    """
    head = checkouts.at_head(checkout.folder, patched)
    if head and _become(head, patched):
        return WayBack("as in the last commit", head)
    # Beside other lines than a release has: the lines to take out are each the only such one in their file.
    include = [f"--include={path}" for path, content in patched.items() if is_edited(content, path)]
    for options in (include, [*include, "-C0"]):
        for diff in diffs.committed(Part.NEMO, checkout.version):
            try:
                stock = _reversed(diff, patched, *options)
            except DiffError:
                continue
            if _become(stock, patched):
                return WayBack(f"as {diff.name} reversed gives them", stock)
    folder = checkout.folder
    raise DiffError(f"{folder}: neither the last commit nor a committed diff reversed gives files that become these")


def _become(stock: Files, patched: Files) -> bool:
    """Whether the patched files are the stock ones, each as it is or edited."""
    try:
        edits = {edit.path: edit for edit in parts.edits_of(stock, frozenset({Part.NEMO}))}
    except DiffError:
        return False
    return all(
        path in edits and content in (edits[path].before, edits[path].after) for path, content in patched.items()
    )


def _reversed(diff: Committed, files: Files, *options: str) -> Files:
    """The files with a diff removed from those that have it. Raises DiffError with git's reason."""
    # The committed diffs have plain line ends; a checkout may have others.
    returns = {path for path, content in files.items() if content.count(b"\n") == content.count(b"\r\n") > 0}
    plain = {path: _replaced(files[path], b"\r\n", b"\n", path in returns) for path in files}
    stock = git.apply(diff.text, plain, "-R", *options)
    return {path: _replaced(content, b"\n", b"\r\n", path in returns) for path, content in stock.items()}


def _replaced(content: bytes, old: bytes, new: bytes, wanted: bool) -> bytes:
    return content.replace(old, new) if wanted else content
