"""Replaces files of a checkout: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from nemo_patches.vendoring.checkouts import PATHS
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.git import Files
from nemo_patches.vendoring.parts import FOLDER, PLACES

_VERSION_FILE = "nemo/package_info.py"  # which every NeMo has
_OUR_FOLDERS = PLACES[::-1]  # the inner ones first
_STAGED = f"nemo_patches-{socket.gethostname()}-"  # and a process id; hosts may share the checkout


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
    that is a hard link, as of uv's cache, stops being one. Modes stay; what is new can be read by whoever reads NeMo.
    """
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    changed.sort(key=lambda path: (path in before, path not in after, path))  # no encoder is without its runtime
    require_no_links(checkout, changed)
    new_folders = [folder for folder in _OUR_FOLDERS if not (checkout / folder).exists()]
    staged: dict[str, Path] = {}
    done: list[str] = []
    try:
        _remove_leftovers(checkout)
        for path in changed:
            _require_replaceable(checkout / path, before.get(path))
            if path in after:
                (checkout / path).parent.mkdir(parents=True, exist_ok=True)
                new = (checkout / path).with_name(f".{Path(path).name}.{_STAGED}{os.getpid()}")
                with new.open("xb") as file:
                    staged[path] = new
                    file.write(after[path])
                if path in before:
                    shutil.copymode(checkout / path, staged[path])
                else:  # not by the umask: with 077 no other user could import NeMo
                    staged[path].chmod(stat.S_IMODE((checkout / _VERSION_FILE).stat().st_mode) | stat.S_IWUSR)
        for folder in filter(Path.exists, map(checkout.joinpath, new_folders)):
            shutil.copymode((checkout / FOLDER).parent, folder)
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
        _remove_empty(checkout, new_folders)
    _remove_empty(checkout, _OUR_FOLDERS)


def _remove_leftovers(checkout: Path) -> None:
    """Remove files left by a process of this host that was killed in replace(); other hosts' may be in use."""
    for folder in {*(str(Path(path).parent) for path in PATHS), *_OUR_FOLDERS}:
        for file in (checkout / folder).glob(f".*.{_STAGED}*"):
            pid = file.name.rpartition("-")[2]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                file.unlink(missing_ok=True)


def _remove_empty(checkout: Path, folders: Iterable[str]) -> None:
    """Remove these folders, with Python's cache, where no Python file is in them."""
    for folder in (checkout / path for path in folders):
        if folder.is_dir() and not any(folder.glob("*.py")):
            shutil.rmtree(folder / "__pycache__", ignore_errors=True)
            with contextlib.suppress(OSError):  # other files in it belong to the user
                folder.rmdir()


def _require_replaceable(file: Path, content: bytes | None) -> None:
    """Raises DiffError, or OSError if it cannot be read."""
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
