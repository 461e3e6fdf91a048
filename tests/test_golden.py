"""One example of what `diagnose` says for each verdict, and what commands say of what is typed
wrong.

Both stand in tests/golden; `make golden` writes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import test_evidence
import test_flight_recorder
import test_traces
import transcripts
from diagnosing import diagnose_logs
from rich.console import Console
from test_watchdog_log import public_logs

from nemo_patches.tools.diagnose import report_text
from nemo_patches.tools.diagnose.findings import Diagnosis

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def _show(report: Diagnosis) -> None:
    """As the command does, without its table of ranks."""
    report_text.show(replace(report, ranks=()), Console(width=160))
    raise SystemExit(report.exit_code)


def _traces(schedules: list[list[Any]], **more: Any) -> None:
    """Of what each rank does."""
    folder = Path(mkdtemp(dir="."))
    _show(
        test_traces.report_on(
            replace(test_traces.Scenario(schedules, "", ()), **more), folder
        )
    )


def _two(common: list[Any], odd: list[Any], usual: list[Any]) -> list[list[Any]]:
    return [common + usual, common + odd]


def _log(text: str) -> None:
    Path("train.log").write_text(text)
    _show(diagnose_logs([Path("train.log")]))


def _public(wanted: str) -> None:
    """A log that somebody has published, in tests/public_logs.txt."""
    _log(next(text for issue, _, _, text in public_logs() if issue == wanted))


def _facts(*given: Any, **more: Any) -> None:
    _show(test_evidence.report(*given, **more))


def _dumps(entries: Mapping[int, Any]) -> None:
    """Of torch's Flight Recorder."""
    _show(
        test_flight_recorder.diagnose_dumps(
            test_flight_recorder.write(Path(mkdtemp(dir=".")), dict(entries))
        )
    )


def _crossed() -> None:
    """Two ranks, each in a collective of another group."""
    folder = Path(mkdtemp(dir="."))
    groups = {"0": [0, 1], "1": [0, 1]}
    waits = {
        0: test_flight_recorder.steps(1),
        1: [test_flight_recorder.in_group("1", 1)],
    }
    test_flight_recorder.of_groups(
        folder, {rank: (groups, waits[rank]) for rank in waits}
    )
    _show(test_flight_recorder.diagnose_dumps(folder))


def test_the_words_of_each_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "traces": _traces,
        "log": _log,
        "public": _public,
        "facts": _facts,
        "dumps": _dumps,
        "crossed": _crossed,
    }
    given |= {
        "two": _two,
        "recorded": test_flight_recorder.steps,
        "facts_of": test_evidence.facts,
    }
    transcripts.compare(
        "diagnose", tmp_path, {**vars(test_traces), **vars(test_evidence), **given}
    )


def test_the_words_for_what_is_typed_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transcripts.compare("command_line", tmp_path)
