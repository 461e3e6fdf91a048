"""NP412: a look at the GPU's values beside each call of the encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import NOTE

pytestmark = pytest.mark.one_nemo


def forward(*lines: str) -> str:
    head = "class Mine(torch.nn.Module):\n    def forward(self, audio, step):\n"
    return head + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize(
    "lines",
    [
        ["torch.cuda.synchronize()", "y = self.encoder(audio)"],
        ["y = self.encoder(audio)", "torch.cuda.synchronize(audio.device)"],
        ["if torch.isnan(audio).any():", "    print('!')", "y = self.encoder(audio)"],
        [
            "if not audio.isfinite().all():",
            "    raise ValueError",
            "self.encoder(audio)",
        ],
        ["y = self.encoder(audio)", "assert not y.isnan().any()"],
        ["bad = torch.isinf(audio).any().item()", "y = self.encoder(audio)"],
        ["for x in audio:", "    y = self.encoder(x)", "    torch.cuda.synchronize()"],
        [
            "with torch.no_grad():",
            "    torch.cuda.synchronize()",
            "    y = self.encoder(audio)",
        ],
        [
            "if audio is not None:",
            "    torch.cuda.synchronize()",
            "    y = self.encoder(audio)",
        ],
    ],
)
def test_a_look_in_each_step(tmp_path: Path, lines: list[str]) -> None:
    (finding,) = found(tmp_path, "NP412", forward(*lines))
    assert finding.severity is NOTE
    assert "A guess" in finding.what


@pytest.mark.parametrize(
    "lines",
    [
        ["if step == 10:", "    torch.cuda.synchronize()", "y = self.encoder(audio)"],
        ["torch.cuda.synchronize()", "y = self.decoder(audio)"],
        ["bad = torch.isnan(audio)", "y = self.encoder(audio)"],
        ["y = self.encoder(audio)", "self.seen = y.isnan().any()"],
        [
            "if step > 0 and self.debug:",
            "    torch.cuda.synchronize()",
            "self.encoder(1)",
        ],
    ],
)
def test_what_does_not_wait(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP412", forward(*lines)) == []
