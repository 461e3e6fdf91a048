"""`nemo-patches diagnose` in this process: its report, and examples of logs and stacks with what
is to be reported of them.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from nemo_patches.cli import app
from nemo_patches.tools.diagnose import reading
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.judge import judge


def diagnosed(*paths: Path, over: bool = True) -> Any:
    """Its report, with the JSON's names and tuples for its lists.

    over: the job is; its traces are made old, so that nothing waits for them to grow.
    """
    for path in paths if over else ():
        for file in path.iterdir() if path.is_dir() else ():
            os.utime(file, (0, 0))
    done = CliRunner().invoke(app, ["diagnose", *map(str, paths), "--json"])
    assert not done.stderr, done.stderr
    report = json.loads(done.stdout, object_hook=_with_names)
    assert report.exit_code == done.exit_code
    return report


def _with_names(content: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            key: tuple(one) if isinstance(one, list) else one
            for key, one in content.items()
        }
    )


def critical(report: Any) -> list[Any]:
    return [one for one in report.findings if one.severity == "critical"]


def report_of(*paths: Path) -> Diagnosis:
    """As the command's, in this process, and with its own types."""
    return judge(reading.joined(reading.read(reading.find(paths))))


def diagnose_logs(paths: list[Path]) -> Diagnosis:
    """As the command does, with what cannot be read and earlier attempts."""
    found = reading.find(paths)
    joined = reading.joined(reading.read(found), found.problems, found.earlier)
    return judge(joined, ", ".join(map(str, paths)))


@dataclass(frozen=True)
class Example:
    """files: their texts by name. The rest is what tests/logs/public_reports.txt explains."""

    files: dict[str, str]
    finding: str
    accused: tuple[int, ...]
    verdict: tuple[str, ...]
    unsaid: tuple[str, ...]
    next_step: str
    innocent: tuple[int, ...]
    exit_code: int
    others: str  # "none": the first finding is the only one


def examples(name: str) -> dict[str, Example]:
    """Of a file in tests/logs."""
    text = Path(__file__).with_name("logs").joinpath(f"{name}.txt").read_text()
    return dict(map(_example, re.split("^%%% ", text, flags=re.MULTILINE)[1:]))


def _example(text: str) -> tuple[str, Example]:
    head, *files = re.split("^%% ", text, flags=re.MULTILINE)
    name, *lines = head.splitlines()
    told: dict[str, list[str]] = {}
    for line in lines:
        key, _, value = line.partition(": ")
        told.setdefault(key, []).append(value)
    (finding,) = told.pop("finding")
    example = Example(
        files={file.partition("\n")[0]: file.partition("\n")[2] for file in files},
        finding=finding,
        accused=_ranks(told.pop("accused", [])),
        verdict=tuple(told.pop("verdict", [])),
        unsaid=tuple(told.pop("not", [])),
        next_step="".join(told.pop("next step", [])),
        innocent=_ranks(told.pop("innocent", [])),
        exit_code=int("".join(told.pop("exit code", ["1"]))),
        others="".join(told.pop("other findings", [])),
    )
    assert not told, f"{name}: {', '.join(told)}?"
    return name, example


def _ranks(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(one) for text in texts for one in text.split(", "))


def check(example: Example, folder: Path) -> None:
    """That this is what is reported of it."""
    for file, text in example.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    found = diagnose_logs([folder / file for file in example.files])
    first = found.findings[0]
    assert first.id == example.finding, found
    assert first.ranks == example.accused, found
    assert found.exit_code == example.exit_code, found
    for words in example.verdict:
        assert words in found.verdict, found
    for words in example.unsaid:
        assert words not in found.verdict + found.next_step, found
    assert example.next_step in found.next_step, found
    assert not (example.others == "none" and found.findings[1:]), found
    accused = {rank for one in found.findings for rank in one.ranks}
    assert not accused & set(example.innocent), found
