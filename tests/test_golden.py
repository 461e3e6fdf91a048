"""Each command's words stand in a file of tests/golden, with what is typed for each; `make golden` writes them anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import test_diagnose
import test_evidence
import test_flight_recorder
import test_nccl_ras
import transcripts
from rich.console import Console
from test_watchdog_log import diagnose_logs, public_logs

from nemo_patches.tools.diagnose import report_text, verdicts
from nemo_patches.tools.diagnose.findings import Diagnosis

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def _show(report: Diagnosis) -> None:
    """As the command does, without its table of ranks."""
    report_text.show(replace(report, ranks=()), Console(width=160))
    raise SystemExit(report.exit_code)


def _traces(given: str | list[list[Any]], **more: Any) -> None:
    """Of a scenario, or of what each rank does."""
    scenario = test_diagnose.SCENARIOS[given] if isinstance(given, str) else test_diagnose.Scenario(given, "", ())
    _show(test_diagnose.report_on(replace(scenario, **more), Path(mkdtemp(dir="."))))


def _public(wanted: str) -> None:
    """A log that somebody has published, in tests/public_logs.txt."""
    Path("train.log").write_text(next(text for issue, _, _, text in public_logs() if issue == wanted))
    _show(diagnose_logs([Path("train.log")]))


def _facts(*given: Any, **more: Any) -> None:
    _show(test_evidence.report(*given, **more))


def _dumps(entries: Mapping[int, Any]) -> None:
    """Of torch's Flight Recorder."""
    _show(test_flight_recorder.diagnose_dumps(test_flight_recorder.write(Path(mkdtemp(dir=".")), dict(entries))))


def _ras(answer: str) -> None:
    Path("ras.txt").write_text(answer)
    _show(test_nccl_ras.saved(Path("ras.txt")))


def test_the_words_of_diagnose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"traces": _traces, "public": _public, "facts": _facts, "dumps": _dumps, "ras": _ras}
    given |= {
        "of_ras": test_nccl_ras,
        "verdicts": verdicts,
        "recorded": test_flight_recorder.steps,
        "facts_of": test_evidence.facts,
    }
    transcripts.compare("diagnose", tmp_path, {**vars(test_diagnose), **vars(test_evidence), **given})
