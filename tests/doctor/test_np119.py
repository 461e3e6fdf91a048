"""NP119: the process group's timeout."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, NOTE, WARNING, found

from nemo_patches.tools.doctor.finding import RuleFinding

pytestmark = pytest.mark.one_nemo


def timeout(value: str) -> str:
    return f"+trainer.strategy.timeout={value}"


def only_refused(findings: list[RuleFinding]) -> bool:
    """Whether all that is said is that NeMo 3.0 takes no duration from YAML."""
    (finding,) = findings
    return (
        finding.severity is NOTE
        and "NeMo 3.0 refuses _target_: datetime.timedelta" in finding.what
    )


@pytest.mark.installed
def test_nemo_3_does_refuse_a_duration() -> None:
    common = pytest.importorskip("nemo.core.classes.common")
    if not hasattr(common, "UnsafeTargetError"):
        pytest.skip("NeMo 2")
    with pytest.raises(common.UnsafeTargetError):
        common.safe_instantiate({"_target_": "datetime.timedelta", "minutes": 1})


def test_what_is_no_duration(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP119", LHOTSE, timeout("3600"))
    assert finding.severity is WARNING


def test_a_duration_is_refused_by_nemo_3(tmp_path: Path) -> None:
    duration = timeout("{_target_: datetime.timedelta, seconds: 5}")
    assert only_refused(found(tmp_path, "NP119", LHOTSE, duration))


def test_none_where_it_is_not_set(tmp_path: Path) -> None:
    assert found(tmp_path, "NP119", LHOTSE) == []
    assert found(tmp_path, "NP119", NEST) == []
    assert found(tmp_path, "NP119", LHOTSE, timeout("${oc.env:TIMEOUT}")) == []


@pytest.mark.parametrize(
    "override",
    [
        "trainer.devices=1",
        "trainer.strategy._target_=lightning.pytorch.strategies.FSDPStrategy",
        "trainer.strategy._target_=lightning.pytorch.strategies.ModelParallelStrategy",
        "trainer.strategy._target_=DeepSpeedStrategy",
    ],
)
def test_what_is_no_duration_stops_any_strategy_on_any_number_of_ranks(
    tmp_path: Path, override: str
) -> None:
    (finding,) = found(tmp_path, "NP119", LHOTSE, timeout("3600"), override)
    assert "the job stops" in finding.what


def test_none_for_what_the_doctor_does_not_know(tmp_path: Path) -> None:
    assert (
        found(
            tmp_path,
            "NP119",
            LHOTSE,
            timeout("3600"),
            "trainer.strategy._target_=mine.Strategy",
        )
        == []
    )
    assert found(tmp_path, "NP119", LHOTSE, timeout("null")) == []
    assert found(tmp_path, "NP119", LHOTSE, timeout("{_target_: my.timeout}")) == []
