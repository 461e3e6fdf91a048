"""Frames of tracebacks and dumps: whether they are the user's own code, and their text."""

from __future__ import annotations

import re

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<")


def is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


def shown(function: str, file: str, line: str | int, folders: int = 0) -> str:
    """ "read (data.py:41)"; with one of its folders: "read (my_asr/data.py:41)"."""
    return f"{function} ({'/'.join(file.split('/')[-1 - folders :])}:{line})"
