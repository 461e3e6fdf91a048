"""What `nemo-patches diff` does with a checkout: prints its diff, tries the committed ones, puts the patch in or out.

git does the applying, in a copy of the few files that it is about; what came out as planned is put in the checkout.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.vendoring import checkouts, diffs
from nemo_patches.vendoring.checkouts import Files
from nemo_patches.vendoring.diffs import FOLDER, DiffError

COMMITTED = Path(__file__).parent.parent / "patches"  # a checkout of nemo_patches has a link there to its patches/


class Declined(DiffError):
    """The answer is no, and there is nothing to do. The text says why."""


@dataclass(frozen=True)
class Committed:
    """One of the diffs that come with nemo_patches."""

    name: str
    text: bytes

    @property
    def series(self) -> str:
        """Of NeMo, as in 2.7."""
        return self.name.removeprefix("nemo-").removesuffix(".diff")


@dataclass(frozen=True)
class WayBack:
    """The files of a checkout without the patch, and where that is from."""

    origin: str
    files: Files


def uncommitted(checkout: Path) -> str:
    """What is to be said of uncommitted changes in the files that a diff would be of; empty where that is nothing.

    (Nothing of a patched checkout, whose changes are the patch.) Raises DiffError.
    """
    diffs.version_of(checkout)  # it is one
    return checkouts.uncommitted(checkout) if checkouts.state_of(diffs.present(checkout)).stock else ""


def printed(checkout: Path) -> str:
    """The diff that puts the bounded sync into a checkout. Only reads; raises DiffError."""
    version = diffs.version_of(checkout)
    state = checkouts.state_of(diffs.present(checkout))
    if not state.stock:
        raise DiffError(f"{checkout}: {state}")
    return _text(version, diffs.edits(checkout))


def check(checkout: Path) -> str:
    """Which committed diff applies to a checkout and gives what `printed` gives, in a sentence. Only reads.

    Raises Declined where none does or the patch is in, DiffError where it cannot be told.
    """
    version = diffs.version_of(checkout)
    files = diffs.present(checkout)
    if not (state := checkouts.state_of(files)).stock:
        raise Declined(f"{checkout}: {state}; {_about_the_way_back(checkout, files)}")
    try:
        checkouts.require_no_links(checkout)
        planned = _after(diffs.edits(checkout))
        else_ = f"`nemo-patches diff --nemo {checkout}` makes one for it"
    except DiffError as error:
        planned, else_ = {}, f"`nemo-patches diff` makes none for it: {error}"
    reasons = []
    for diff in _committed(version):
        own = diff.series == _series(version)
        try:
            given = _applied(diff.text, files)
        except DiffError as error:
            reasons += [f"{diff.name} does not apply ({error})"] * own
            continue
        if given == planned:
            return f"{diff.name} applies to this NeMo {version}, and gives what `nemo-patches diff` gives"
        reasons.append(f"{diff.name} would apply, but gives something else" if planned else f"{diff.name} would apply")
    reason = "; ".join(reasons) or f"no committed diff is for NeMo {_series(version)}, and none of the others applies"
    raise Declined(f"{checkout}: {reason}; {else_}")


def apply(checkout: Path) -> str:
    """Put the bounded sync into a checkout and say so. All or nothing, and only where `reverse` can undo it exactly.

    Raises Declined where it is in already, DiffError where it is partly, or cannot be put in.
    """
    version = diffs.version_of(checkout)
    files = diffs.present(checkout)
    if not (state := checkouts.state_of(files)).stock:
        raise (Declined if state.complete else DiffError)(f"{checkout}: {state}")
    edits = diffs.edits(checkout)
    after = _applied(_text(version, edits).encode("utf-8", "surrogateescape"), files)
    if after != _after(edits):
        raise DiffError(f"{checkout}: git made something else of the diff than was planned; nothing was changed")
    keep = f"keep it, and apply it with git: nemo-patches diff --nemo {checkout} > FILE"
    try:
        way_back = _way_back(checkout, after)
    except DiffError as error:
        raise DiffError(f"{error}, so --reverse could not take the patch back; {keep}") from None
    if way_back.files != files:
        names = ", ".join(path for path in files if files[path] != way_back.files.get(path))
        raise DiffError(
            f"{checkout}: --reverse would give its files {way_back.origin}, without what is in {names} now; {keep}"
        )
    checkouts.replace(checkout, files, after)
    return f"{checkout}: patched {', '.join(sorted(files))}; their runtime is in {FOLDER}"


def reverse(checkout: Path) -> str:
    """Take the bounded sync out of a checkout, also where only a part of it is in, and say by what.

    Raises Declined where it is not in, DiffError where it cannot be taken out without anything else.
    """
    diffs.version_of(checkout)  # it is one
    files = diffs.present(checkout)
    state = checkouts.state_of(files)
    if state.stock:
        raise Declined(f"{checkout}: not patched, so there is nothing to take back")
    by_hand = "take it back with the diff that was applied: git apply -R FILE"
    if state.foreign:
        raise DiffError(f"{checkout}: {state}; it was changed here, or is of another version; {by_hand}")
    try:
        way_back = _way_back(checkout, files)
    except DiffError as error:
        raise DiffError(f"{error}; {by_hand}") from None
    checkouts.replace(checkout, files, way_back.files)
    return f"{checkout}: the patch is out; its files are {way_back.origin}"


def _committed(version: str) -> list[Committed]:
    """Those that come with nemo_patches, that of the version's series first. Raises DiffError where none does."""
    found = [Committed(file.name, file.read_bytes()) for file in COMMITTED.glob("nemo-*.diff")]
    if not found:
        raise DiffError(
            "this copy of nemo_patches has no committed diffs with it; a checkout of it has them in patches/"
        )
    numbers = {diff: tuple(map(int, diff.series.split("."))) for diff in found}
    return sorted(found, key=lambda diff: (diff.series == _series(version), numbers[diff]), reverse=True)


def _series(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def _text(version: str, edits: list[diffs.Edit]) -> str:
    return diffs.header(version) + diffs.unified(edits)


def _after(edits: list[diffs.Edit]) -> Files:
    return {edit.path: edit.after for edit in edits}


def _about_the_way_back(checkout: Path, files: Files) -> str:
    try:
        return f"--reverse takes it out, to files {_way_back(checkout, files).origin}"
    except DiffError as error:
        return f"--reverse would refuse: {error}"


def _way_back(checkout: Path, files: Files) -> WayBack:
    """The files of a checkout without the patch that is in them, or in a part of them. Raises DiffError.

    Only what becomes exactly these files when it is edited again is taken for it.
    """
    encoders = [path for path in files if not path.startswith(f"{FOLDER}/")]
    head = checkouts.at_head(checkout, encoders)
    if head and _become(head, files):
        return WayBack("as in the last commit", head)
    # Beside other lines than a release has: the lines to take out are each the only such one in their file.
    having = checkouts.state_of(files).having
    include = [f"--include={path}" for path in files if path in having or path.startswith(f"{FOLDER}/")]
    for options in (include, [*include, "-C0"]):
        for diff in _committed(diffs.version_of(checkout)):
            try:
                stock = _reversed(diff, files, *options)
            except DiffError:
                continue
            if _become(stock, files):
                return WayBack(f"as {diff.name} reversed gives them", stock)
    raise DiffError(f"{checkout}: neither the last commit nor a committed diff reversed gives files that become these")


def _become(stock: Files, files: Files) -> bool:
    """Whether these files are the stock ones, each as it is or edited."""
    try:
        edits = diffs.edits_of(stock)
    except DiffError:
        return False
    paths = {edit.path for edit in edits}
    return files.keys() <= paths and all(files.get(edit.path) in (edit.before, edit.after) for edit in edits)


def _reversed(diff: Committed, files: Files, *options: str) -> Files:
    """The files without a diff, which is taken out of those that it is in. Raises DiffError with git's reason."""
    # The committed diffs have plain line ends; a checkout may have others.
    returns = {path for path, content in files.items() if content.count(b"\n") == content.count(b"\r\n") > 0}
    plain = {path: _replaced(files[path], b"\r\n", b"\n", path in returns) for path in files}
    stock = _applied(diff.text, plain, "-R", *options)
    return {path: _replaced(content, b"\n", b"\r\n", path in returns) for path, content in stock.items()}


def _replaced(content: bytes, old: bytes, new: bytes, wanted: bool) -> bytes:
    return content.replace(old, new) if wanted else content


def _applied(diff: bytes, files: Files, *options: str) -> Files:
    """The files after `git apply`. Raises DiffError with git's reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        diffs.clean_git(name, "init", "-q", "--template=")
        diffs.write(folder, files)
        diffs.clean_git(name, "apply", "--whitespace=nowarn", *options, "-", given=diff)
        found = [path.relative_to(folder).as_posix() for path in (folder / "nemo").rglob("*") if path.is_file()]
        return {path: (folder / path).read_bytes() for path in found}
