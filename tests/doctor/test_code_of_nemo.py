"""The rules on code beside NeMo's own models: no warning about what NVIDIA trains with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from codes import beside_nemo

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Severity

pytestmark = beside_nemo

FOLDERS = (
    "collections/asr/models",
    "collections/asr/modules",
    "collections/speechlm2/models",
    "core/classes",
)
NOTES = 12  # of NP405 to NP407: evaluations without a batch, wer.compute in a sub-batch (NP116)


@pytest.fixture(scope="module")
def nemo() -> Path:
    spec = importlib.util.find_spec("nemo")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_no_warning_on_nemos_own_models(nemo: Path) -> None:
    rules = examination.chosen(["NP001", "NP4"])
    files = [
        path for folder in FOLDERS for path in sorted((nemo / folder).glob("*.py"))
    ]
    assert len(files) > 50
    said = []
    for path in files:
        done = examination.examine_code(path, rules)
        assert not done.error, done.error
        said += [
            (path.name, rule.identifier, each.severity, each.what)
            for rule, each in done.findings
        ]
    assert [each for each in said if each[2] > Severity.NOTE] == []
    assert len([each for each in said if each[1] >= "NP405"]) <= NOTES
