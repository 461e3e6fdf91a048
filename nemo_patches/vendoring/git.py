"""git: without any configuration to make and apply diffs, with the user's to query the checkout."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from nemo_patches.vendoring.errors import DiffError

Files = Mapping[str, bytes]  # by path from the checkout's root, with slashes
_LIMIT = timedelta(seconds=60)  # for each git that is started


def diff(before: Files, after: Files) -> bytes:
    """What changes between two sets of files, as git prints it; a file that is only in `after` is new."""
    with tempfile.TemporaryDirectory() as folder:
        _isolated(folder, "init", "-q", "--template=")
        _write(Path(folder), before)
        _isolated(folder, "add", ".")
        _write(Path(folder), after)
        _isolated(folder, "add", "-N", ".")
        options = ("--no-ext-diff", "--no-color", "--no-renames", "--full-index", "--src-prefix=a/", "--dst-prefix=b/")
        return _isolated(folder, "diff", *options)


def apply(patch: bytes, files: Files, *options: str) -> dict[str, bytes]:
    """The files after `git apply`, which runs on a copy of them. Raises DiffError with git's reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _isolated(name, "init", "-q", "--template=")
        _write(folder, files)
        _isolated(name, "apply", "--whitespace=nowarn", *options, "-", stdin=patch)
        paths = [path for path in (folder / "nemo").rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def ask(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """git in a checkout's repository, with the user's configuration, which decides how files are checked out.

    Raises DiffError where git is not there or does not end in time; a failure is the caller's to read.
    """
    # Inside a hook, git's variables name the repository of that hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG")}
    # A status writes no index, and starts no watcher of the file system that would outlive it.
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "--literal-pathspecs")
    return _run(checkout, variables, options, arguments)


def complaint(stderr: bytes) -> str:
    """The line with git's error; other lines may come before it."""
    lines = stderr.decode(errors="replace").splitlines() or ["failed, and did not say why"]
    return next((line for line in lines if line.startswith(("error:", "fatal:"))), lines[0])


def _isolated(folder: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """The output of git in a folder that is, or becomes, its own repository. Raises DiffError with git's reason.

    Nobody's configuration, attributes, variables or surrounding repository has a say in it.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Under an empty HOME there is no configuration and no attributes file, for every version of git.
    variables |= {"HOME": f"{folder}/.git", "XDG_CONFIG_HOME": f"{folder}/.git", "GIT_DIR": f"{folder}/.git"}
    variables |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    options = ("-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.quotepath=false")
    done = _run(Path(folder), variables, options, arguments, stdin)
    if done.returncode:
        raise DiffError(f"git {arguments[0]}: {complaint(done.stderr)}")
    return done.stdout


def _run(
    folder: Path, variables: dict[str, str], options: tuple[str, ...], arguments: tuple[str, ...], stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", *options, *arguments],
            cwd=folder,
            env=variables | {"LC_ALL": "C"},
            input=stdin,
            capture_output=True,
            timeout=_LIMIT.total_seconds(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiffError(f"git {arguments[0]}: {error}") from None


def _write(folder: Path, files: Files) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
