"""Reads traces for tests: every line must be a record, but for a last one that was cut."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def files(folder: Path) -> list[Path]:
    """By rank, then in the order in which they were written last; not one that its writer has just
    removed.
    """
    written = {}
    for file in folder.glob("rank-*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            written[file] = file.stat().st_mtime_ns
    return sorted(written, key=lambda file: (file.name.split(".")[:2], written[file]))


def size_bytes(folder: Path) -> int:
    """Of all of them together."""
    size = 0
    for file in files(folder):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def records(file: Path, cut: bool = False) -> list[dict[str, Any]]:
    """cut: the last line may be half a line."""
    lines = file.read_bytes().split(b"\n")
    assert cut or lines[-1] == b""
    return [json.loads(line) for line in lines[:-1]]


def of_kind(
    found: list[dict[str, Any]], kind: str, **fields: Any
) -> list[dict[str, Any]]:
    return [
        one
        for one in found
        if one["k"] == kind
        and all(one[name] == value for name, value in fields.items())
    ]


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [one["k"] for one in found]
