"""Which package a file belongs to:
the user's own code, Python's standard library, ours, or another.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sysconfig
from typing import NamedTuple

PYTHON = "python"
OURS = "nemo_patches"
_CELL = "<ipython-input"  # the user's own, from no file; else "<" is some library's
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}))
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGES = ("channel", "sync", "watch", "tracing", "options")
_OUR_FOLDERS = (_FOLDER, *(os.path.join(_FOLDER, name) for name in _PACKAGES))


class Origin(NamedTuple):
    """package: empty for the user's own code. shown: the file's path in a log line."""

    package: str
    shown: str


def origin(file: str) -> Origin:
    parts = file.split(os.sep)
    for folder in _INSTALLED:
        if folder in parts:
            inner = parts[parts.index(folder) + 1 :]
            return Origin(inner[0], "/".join(inner))
    is_from_no_file = file.startswith("<") and not file.startswith(_CELL)
    if is_from_no_file or file.startswith(_STDLIB):
        return Origin(PYTHON, f"{PYTHON}/{parts[-1]}")
    if os.path.dirname(file) in _OUR_FOLDERS:
        return Origin(OURS, f"{OURS}/{parts[-1]}")
    return Origin("", "/".join(parts[-2:]))
