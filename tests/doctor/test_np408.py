"""NP408: a copy of NeMo's encoder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from codes import beside_nemo, found

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Severity

pytestmark = [pytest.mark.one_nemo, pytest.mark.installed, beside_nemo]

CLASS = "class ConformerEncoder("


def nemos(file: str = "conformer_encoder") -> str:
    spec = importlib.util.find_spec("nemo")
    assert spec is not None
    assert spec.origin is not None
    return (
        Path(spec.origin).parent / "collections" / "asr" / "modules" / f"{file}.py"
    ).read_text()


def test_a_copy_is_found_whatever_its_name(tmp_path: Path) -> None:
    assert nemos().count(CLASS) == 1
    for name in ("ConformerEncoder", "MyEncoder"):
        copied = [
            each.what
            for each in found(
                tmp_path, "NP408", nemos().replace(CLASS, f"class {name}(")
            )
        ]
        (whole,) = (
            each
            for each in copied
            if each.startswith(f"{name} is a copy of NeMo's ConformerEncoder, by ")
        )
        assert whole.endswith(
            "does not patch it, and its update_max_seq_length waits without limit for a"
            " missing rank"
        )
        assert copied == [whole]
    no_reduce = nemos().replace("torch.distributed.all_reduce(", "print(")
    (note,) = found(tmp_path, "NP408", no_reduce)
    assert note.severity is Severity.NOTE
    assert note.what.endswith(
        " methods, and no subclass: nemo_patches does not patch it"
    )


def test_none_for_a_subclass_another_encoder_or_nemo_itself(tmp_path: Path) -> None:
    own = "class Mine(ConformerEncoder):\n    def forward(self, x):\n        pass\n\n"
    own += (
        "    def update_max_seq_length(self, seq_length, device):\n       "
        " dist.all_reduce(seq_length)\n\n"
    )
    own += "    def set_max_audio_length(self, length):\n        pass\n"
    assert found(tmp_path, "NP408", own) == []
    assert (
        found(tmp_path, "NP408", own.replace("(ConformerEncoder)", "(torch.nn.Module)"))
        != []
    )
    other = (
        "class Mine(torch.nn.Module):\n    def forward(self, x):\n        pass\n\n   "
        " def train(self):\n        pass\n"
    )
    assert found(tmp_path, "NP408", other) == []
    vendored = tmp_path / "nemo" / "collections" / "asr" / "modules"
    vendored.mkdir(parents=True)
    (vendored / "conformer_encoder.py").write_text(nemos())
    done = examination.examine_code(
        vendored / "conformer_encoder.py", examination.chosen(["NP408"])
    )
    assert done.findings == ()
