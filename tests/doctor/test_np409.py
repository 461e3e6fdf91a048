"""NP409: a wait for the GPU in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import Severity

pytestmark = pytest.mark.one_nemo


def method(*lines: str, name: str = "forward") -> str:
    head = f"class Mine(torch.nn.Module):\n    def {name}(self, x):\n"
    return head + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["torch.cuda.synchronize()"], "torch.cuda.synchronize()"),
        (["if torch.cuda.is_available():", "    torch.cuda.synchronize(x.device)"], "torch.cuda.synchronize()"),
        (["with torch.no_grad():", "    if x.isnan().any():", "        x = x * 0"], "x.isnan().any()"),
        (["if not torch.isfinite(x).all():", "    raise ValueError"], "not torch.isfinite(x).all()"),
        (["assert not torch.isinf(x).any()"], "not torch.isinf(x).any()"),
        (["if torch.isnan(x).any() or self.stop:", "    return None"], "torch.isnan(x).any() or self.stop"),
    ],
)
def test_a_wait(tmp_path: Path, lines: list[str], text: str) -> None:
    for name in ("forward", "training_step"):
        (finding,) = found(tmp_path, "NP409", method(*lines, name=name))
        assert finding.what.startswith(f"Mine.{name}: `{text}` ")
        assert finding.severity is Severity.NOTE


@pytest.mark.parametrize(
    "lines",
    [
        ["if self.debug:", "    torch.cuda.synchronize()"],
        ["if self.global_step % 100 == 0 and x.isnan().any():", "    print(x)"],
        ["if math.isnan(self.best):", "    print(x)"],
        ["x = torch.where(x.isnan(), 0, x)"],
        ["if x.is_cuda:", "    x = x.half()"],
    ],
)
def test_none_where_it_is_seldom_or_on_the_host(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP409", method(*lines)) == []
    assert found(tmp_path, "NP409", method("torch.cuda.synchronize()", name="on_train_end")) == []
