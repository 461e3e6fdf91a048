"""The source of a frame, as its process sees it:
which functions its line calls, and which loop it is in.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import stat
import threading

_LARGEST = 1 << 21  # bytes
NO_LOOP = -1
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Python 3.11's parser counts its depth per interpreter: if two threads parse at once, one gets a
# SystemError.
_parsing = threading.Lock()


def calls(pid: int, file: str, line: int) -> tuple[str, ...]:
    """Names of what this line calls, and "with": C functions have no frames."""
    lines = _lines(pid, file)
    text = lines[line - 1].partition("#")[0] if 0 < line <= len(lines) else ""
    names = re.findall(r"\b([A-Za-z_]\w*)\s*\(", text)
    return (*names[:16], *(["with"] if re.match(r"\s*(async\s+)?with\b", text) else []))


def loop_of(pid: int, file: str, line: int, variable: str) -> int | None:
    """The first line of the innermost loop around this line that sets the variable.

    0: the line is outside such a loop of its function. NO_LOOP: no loop of the function sets it, so
    the variable is another one in each call. None: there is no source.
    """
    lines = _lines(pid, file)
    if not lines:
        return None
    loops = _loops("".join(lines), line, variable)
    around = [(first, last) for first, last in loops if first <= line <= last]
    return max(around)[0] if around else 0 if loops else NO_LOOP


def _lines(pid: int, file: str) -> list[str]:
    """The file's lines, within the process's root (a container) or relative to its working
    directory.
    """
    root = f"/proc/{pid}/root" if file.startswith("/") else f"/proc/{pid}/cwd"
    path = os.path.join(root, file.lstrip("/"))
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return []
    return (
        linecache.getlines(path)
        if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
        else []
    )


@functools.lru_cache(maxsize=1 << 12)
def _loops(text: str, line: int, variable: str) -> tuple[tuple[int, int], ...]:
    """First and last lines of the loops that set the variable, in the innermost function that has
    this line.
    """
    tree = _tree(text)
    if tree is None:
        return ()
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    function = max(functions, key=lambda node: node.lineno, default=tree)
    loops = [node for node in ast.walk(function) if isinstance(node, _LOOPS)]
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in loops
        if variable in _set_in(node)
    )


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module | None:
    try:
        with _parsing:
            return ast.parse(text)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # of a newer Python than this one, or none at all
        return None


def _set_in(loop: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
