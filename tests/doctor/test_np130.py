"""NP130: an input_cfg that NeMo refuses; tests/test_doctor_refused.py has NeMo's own word on each."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, WARNING, found

pytestmark = pytest.mark.one_nemo

NEMO = "type: nemo, manifest_filepath: a.json"


def of(*entries: str) -> str:
    return f"+model.train_ds.input_cfg=[{', '.join(entries)}]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (of(), "input_cfg is empty"),
        (of("a.yaml", "b.yaml"), "a list of files is no list of inputs"),
        (of("{manifest_filepath: a.json}"), "input_cfg.0 has no type"),
        (of("{type: nemo_tared, manifest_filepath: a.json}"), "looks like nemo_tarred"),
        (of("{type: group}"), "a group without an input_cfg"),
        (
            of(f"{{{NEMO}, weight: 1}}", f"{{{NEMO}}}"),
            "inputs 1 have no weight, and others have one",
        ),
        (
            of("{type: group, input_cfg: [{manifest_filepath: a.json}]}"),
            "input_cfg.0.input_cfg.0 has no type",
        ),
    ],
)
def test_what_nemo_refuses(tmp_path: Path, override: str, said: str) -> None:
    findings = found(tmp_path, "NP130", LHOTSE, override)
    assert said in " ".join(finding.what for finding in findings)
    assert {finding.severity for finding in findings} == {WARNING}


def test_what_nemo_takes(tmp_path: Path) -> None:
    for override in (
        of(f"{{{NEMO}}}"),
        of(f"{{{NEMO}, weight: 0}}"),
        of(f"{{{NEMO}, weight: 1}}", f"{{{NEMO}, weight: 2.5}}"),
        of(f"{{type: group, weight: 1, input_cfg: [{{{NEMO}}}]}}"),
        of("{type: parquet, manifest_filepath: [a.parquet, b.parquet]}"),
        of("{type: my_own, path: x}"),
        of("{type: '???', manifest_filepath: a.json}"),
        "+model.train_ds.input_cfg='???'",
        "+model.train_ds.input_cfg=file.yaml",
    ):
        assert found(tmp_path, "NP130", LHOTSE, override) == []
