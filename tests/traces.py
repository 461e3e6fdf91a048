"""Reads traces for tests: every line must be a record, but for a last one that was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def files(folder: Path) -> list[Path]:
    """By rank, then in the order in which they were begun."""
    return sorted(folder.glob("rank-*.jsonl"), key=lambda file: (file.name.split(".")[:2], file.stat().st_mtime_ns))


def records(file: Path, cut: bool = False) -> list[dict[str, Any]]:
    """cut: the last line may be half a line."""
    lines = file.read_bytes().split(b"\n")
    assert cut or lines[-1] == b""
    return [json.loads(line) for line in lines[:-1]]


def of_kind(found: list[dict[str, Any]], kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [one for one in found if one["k"] == kind and all(one[name] == value for name, value in fields.items())]


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [one["k"] for one in found]
