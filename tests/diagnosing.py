"""`nemo-patches diagnose --json` in this process, for scenarios that judge ids, ranks and exit
codes.
"""

from __future__ import annotations

import json
import os
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
