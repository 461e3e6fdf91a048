"""NP403: an update_max_seq_length of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import beside_nemo, found

pytestmark = [pytest.mark.one_nemo, pytest.mark.installed, beside_nemo]

OWN = """\
class Base(ConformerEncoder):
    pass


class Mine(Base):
    def update_max_seq_length(self, seq_length, device):
"""


def test_calls_that_nemos_makes(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP403", f"{OWN}        self.pos_enc.extend_pe(seq_length, device)\n"
    )
    said = (
        "Mine.update_max_seq_length does not call is_initialized, all_reduce,"
        " set_max_audio_length"
    )
    assert finding.what.startswith(said)
    reduces = "        if dist.is_initialized():\n            dist.all_reduce(device)\n"
    (finding,) = found(tmp_path, "NP403", f"{OWN}{reduces}")
    assert finding.what.startswith(
        "Mine.update_max_seq_length does not call set_max_audio_length,"
    )


def test_none_with_nemos_own(tmp_path: Path) -> None:
    assert (
        found(
            tmp_path,
            "NP403",
            f"{OWN}        super().update_max_seq_length(seq_length, device)\n",
        )
        == []
    )
    assert (
        found(
            tmp_path,
            "NP403",
            "class Mine(ConformerEncoder):\n    def forward(self, x):\n        pass\n",
        )
        == []
    )
