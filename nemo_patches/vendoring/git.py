"""git, to make diffs and to try them:
nobody's configuration, attributes, variables or repository has a say in it.
"""

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
    """What changes between two sets of files, as git prints it; a file that is only in `after` is
    new.
    """
    with tempfile.TemporaryDirectory() as folder:
        _git(folder, "init", "-q", "--template=")
        _write(Path(folder), before)
        _git(folder, "add", ".")
        _write(Path(folder), after)
        _git(folder, "add", "-N", ".")
        options = ("--no-ext-diff", "--no-color", "--no-renames", "--full-index")
        return _git(folder, "diff", *options, "--src-prefix=a/", "--dst-prefix=b/")


def apply(patch: bytes, files: Files) -> dict[str, bytes]:
    """The files after `git apply`, which runs on a copy of them. Raises DiffError with git's
    reason.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _git(name, "init", "-q", "--template=")
        _write(folder, files)
        _git(name, "apply", "--whitespace=nowarn", "-", stdin=patch)
        paths = [path for path in (folder / "nemo").rglob("*") if path.is_file()]
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in paths
        }


def _git(folder: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """The output of git in a folder that is, or becomes, its own repository. Raises DiffError with
    git's reason.
    """
    own = f"{folder}/.git"
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }
    # Under an empty HOME there is no configuration and no attributes file, for every version of
    # git.
    variables |= {"HOME": own, "XDG_CONFIG_HOME": own, "GIT_DIR": own, "LC_ALL": "C"}
    variables |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    options = ("core.autocrlf=false", "core.safecrlf=false", "core.quotepath=false")
    command = [
        "git",
        *(word for option in options for word in ("-c", option)),
        *arguments,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            input=stdin,
            capture_output=True,
            timeout=_LIMIT.total_seconds(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiffError(f"git {arguments[0]}: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or [
            "failed, and did not say why"
        ]
        complaint = next(
            (line for line in lines if line.startswith(("error:", "fatal:"))), lines[0]
        )
        raise DiffError(f"git {arguments[0]}: {complaint}")
    return done.stdout


def _write(folder: Path, files: Files) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
