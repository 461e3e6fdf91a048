"""`nemo-patches run`:
turns this process into the user's command, with auto-apply in its environment.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from nemo_patches import patching

# Python ignores these signals; a command that a shell starts does not.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")


def with_auto_apply(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process patches NeMo: our folder first on PYTHONPATH,
    then the user's.
    """
    path = [str(Path(next(iter(patching.__path__)), "boot").resolve())]
    if environment.get("PYTHONPATH"):
        path.append(environment["PYTHONPATH"])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that exit code, signals, terminal and pid are the command's own.
    Raises OSError.
    """
    if not command[0]:  # an unset variable; execvpe would raise a ValueError
        raise FileNotFoundError(errno.ENOENT, "an empty name is no command")
    for name in _IGNORED_BY_PYTHON:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environment))


def cannot_start(command: Sequence[str], error: OSError) -> tuple[str, int]:
    """The line on a command that could not be started, and a shell's exit code for it."""
    code = 127 if isinstance(error, FileNotFoundError) else 126
    return f"nemo-patches run: {command[0]}: {error.strerror}", code
