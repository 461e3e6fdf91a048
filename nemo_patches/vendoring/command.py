"""`nemo-patches diff` on a checkout: print its diff, try the committed ones, apply or remove parts.

git does the applying, in a copy of the few files that it is about; what came out as planned is put in the checkout.
"""

from __future__ import annotations

from nemo_patches.vendoring import diffs, git, parts, replacement, way_back
from nemo_patches.vendoring.checkouts import Checkout
from nemo_patches.vendoring.errors import Declined, DiffError
from nemo_patches.vendoring.git import Files
from nemo_patches.vendoring.parts import FOLDER, NEEDED, Part, Parts


def printed(checkout: Checkout, chosen: Parts) -> bytes:
    """The diff for those of the chosen parts that a checkout does not have. Raises DiffError.

    What a part needs may be missing: a printed part is to be read, or applied after another one.
    """
    missing = chosen - checkout.state.parts
    if not missing or not checkout.state.sound:
        raise DiffError(f"{checkout.folder}: {checkout.state}")
    return diffs.text(checkout, missing)


def check(checkout: Checkout, chosen: Parts) -> str:
    """For each chosen part, which committed diff applies and gives what `printed` gives, in a sentence.

    Raises Declined where none does or the parts are in, DiffError where it cannot be told.
    """
    missing = chosen - checkout.state.parts
    if not missing or not checkout.state.sound:
        raise Declined(f"{checkout.folder}: {checkout.state}; {_about_the_way_back(checkout)}")
    return "\n".join(_fitting(checkout, part) for part in Part if part in missing)


def apply(checkout: Checkout, chosen: Parts) -> str:
    """Apply parts of the patch to a checkout and say so: all or nothing, and only if `reverse` can undo it exactly.

    Raises Declined where they are in already, DiffError where the patch is in partly, or they cannot be put in.
    """
    folder, files, state = checkout.folder, checkout.files, checkout.state
    missing = chosen - state.parts
    if not missing or not state.sound:
        raise (Declined if state.sound else DiffError)(f"{folder}: {state}")
    _require_needed(checkout, state.parts | missing, chosen)
    after = git.apply(diffs.text(checkout, missing), files)
    if after != _planned(checkout, missing):
        raise DiffError(f"{folder}: git made something else of the diff than was planned; nothing was changed")
    if Part.NEMO in missing:
        _require_way_back(checkout, after)
    replacement.replace(folder, files, after)
    done = []
    if Part.NEMO in missing:
        done.append(f"patched {', '.join(sorted(_of_nemo(files)))}")
    if folders := missing - {Part.NEMO}:
        done.append(f"put {parts.named(folders)} into {FOLDER}")
    return f"{folder}: {'; '.join(done)}"


def reverse(checkout: Checkout, chosen: Parts) -> str:
    """Remove parts of the patch from a checkout, even if only some of their files are there, and say so.

    Raises Declined where they are not in, DiffError where they cannot be taken out without anything else.
    """
    folder, state = checkout.folder, checkout.state
    taken = chosen & state.parts
    if not taken:
        raise Declined(f"{folder}: {state}, so there is nothing to take back")
    _require_needed(checkout, state.parts - taken, chosen)
    after, origin = _without(checkout, taken)
    replacement.replace(folder, checkout.files, after)
    text = "the patch is out" if taken == state.parts else f"taken out: {parts.named(taken)}"
    return f"{folder}: {text}" + (f"; its files are {origin}" if origin else "")


def _fitting(checkout: Checkout, part: Part) -> str:
    """The committed diff of a part that applies to a checkout. Raises Declined with the reasons if none does."""
    folder, version, series = checkout.folder, checkout.version, diffs.series_of(checkout.version)
    try:
        replacement.require_no_links(folder)
        planned = _planned(checkout, frozenset({part}))
        otherwise = f"`nemo-patches diff --nemo {folder}` makes one for it"
    except DiffError as error:
        planned, otherwise = {}, f"`nemo-patches diff` makes none for it: {error}"
    reasons = []
    for diff in diffs.committed(part, version):
        try:
            after = git.apply(diff.text, checkout.files)
        except DiffError as error:
            if diff.series in ("", series):  # the others were made from other code
                reasons.append(f"{diff.name} does not apply ({error})")
            continue
        if after == planned:
            return f"{diff.name} applies to this NeMo {version}, and gives what `nemo-patches diff` gives"
        reasons.append(f"{diff.name} would apply, but gives something else" if planned else f"{diff.name} would apply")
    reason = "; ".join(reasons) or f"no committed diff is for NeMo {series}, and none of the others applies"
    raise Declined(f"{folder}: {reason}; {otherwise}")


def _planned(checkout: Checkout, chosen: Parts) -> Files:
    """The files of a checkout with these parts applied."""
    return {**checkout.files, **{edit.path: edit.after for edit in checkout.edits(chosen)}}


def _of_nemo(files: Files) -> Files:
    return {path: content for path, content in files.items() if parts.part_of(path) is Part.NEMO}


def _require_needed(checkout: Checkout, result: Parts, chosen: Parts) -> None:
    """Raise DiffError if a part would then be applied without the one that it needs."""
    for part, needed in NEEDED.items():
        if part in result and needed not in result:
            given = ",".join(name.value for name in Part if name in chosen)
            other = needed if part in chosen else part
            problem = f"--parts {given} would leave {part.value} in without {needed.value}, which it needs"
            raise DiffError(f"{checkout.folder}: {problem}; allowed is --parts {given},{other.value}")


def _require_way_back(checkout: Checkout, after: Files) -> None:
    """Raise DiffError if `reverse` could not restore NeMo's files exactly as they are now."""
    folder, stock = checkout.folder, _of_nemo(checkout.files)
    keep = f"keep it, and apply it with git: nemo-patches diff --nemo {folder} > FILE"
    try:
        back = way_back.find(checkout, _of_nemo(after))
    except DiffError as error:
        raise DiffError(f"{error}, so --reverse could not take the patch back; {keep}") from None
    if back.files != stock:
        names = ", ".join(path for path in stock if stock[path] != back.files.get(path))
        raise DiffError(
            f"{folder}: --reverse would give its files {back.origin}, without what is in {names} now; {keep}"
        )


def _about_the_way_back(checkout: Checkout) -> str:
    try:
        _, origin = _without(checkout, checkout.state.parts)
    except DiffError as error:
        return f"--reverse would refuse: {error}"
    return "--reverse takes it out" + (f", to files {origin}" if origin else "")


def _without(checkout: Checkout, taken: Parts) -> tuple[Files, str]:
    """The files of a checkout without these parts, and the source of NeMo's own files. Raises DiffError."""
    state = checkout.state
    by_hand = "take it back with the diff that was applied: git apply -R FILE"
    if state.flat:
        raise DiffError(f"{checkout.folder}: {state}")
    if state.foreign:
        raise DiffError(f"{checkout.folder}: {state}; it was changed here, or is of another version; {by_hand}")
    left = {path: content for path, content in checkout.files.items() if parts.part_of(path) not in taken}
    if Part.NEMO not in taken:
        return left, ""
    try:
        back = way_back.find(checkout, _of_nemo(checkout.files))
    except DiffError as error:
        raise DiffError(f"{error}; {by_hand}") from None
    return {**left, **back.files}, back.origin
