"""NP407: a loop over parts of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import Severity

pytestmark = pytest.mark.one_nemo


def forward(*lines: str) -> str:
    head = "class Mine(torch.nn.Module):\n    def forward(self, audio, lengths):\n"
    return head + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "over"),
    [
        (
            ["for part in audio.split(1600, dim=1):", "    self.encoder(part)"],
            "audio.split(1600, dim=1)",
        ),
        (
            [
                "dist.barrier()",
                "for part in self.cut(audio):",
                "    y = self.encoder(part)",
            ],
            "self.cut(audio)",
        ),
        (
            ["for begin in range(0, audio.shape[1], 1600):", "    self.encoder(audio)"],
            "range(0, audio.shape[1], 1600)",
        ),
        (
            [
                "most = int(lengths.max())",
                "for _ in range(most // 100):",
                "    self.encoder(audio)",
            ],
            "range(most // 100)",
        ),
        (
            ["return [self.encoder(part) for part in self.cut(audio)]"],
            "self.cut(audio)",
        ),
        (
            [
                "for index, part in enumerate(self.cut(audio)):",
                "    dist.all_reduce(part)",
            ],
            "enumerate(self.cut(audio))",
        ),
    ],
)
def test_as_many_turns_as_the_batch_is_long(
    tmp_path: Path, lines: list[str], over: str
) -> None:
    (finding,) = found(tmp_path, "NP407", forward(*lines))
    assert f"a loop over `{over}`" in finding.what
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "lines",
    [
        ["for part in audio.chunk(4):", "    self.encoder(part)"],
        ["for _ in range(self.passes):", "    self.encoder(audio)"],
        ["for layer, state in zip(self.layers, audio):", "    self.encoder(state)"],
        ["for name, x in audio.items():", "    self.encoder(x)"],
        ["for x in (audio, audio.flip(1)):", "    self.encoder(x)"],
        ["for part in audio.split(1600):", "    self.decoder(part)"],
        ["turns = torch.tensor(audio.shape[1])", "dist.all_reduce(turns)", "for _ in range(int(turns)):",
         "    self.encoder(audio)"],
    ],
)  # fmt: skip
def test_none_where_all_ranks_make_as_many(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP407", forward(*lines)) == []


def test_it_is_a_note_at_the_end_of_an_evaluation_and_of_backward(
    tmp_path: Path,
) -> None:
    lines = ("for x in audio:", "    dist.all_reduce(x)")
    (finding,) = found(
        tmp_path, "NP407", forward(*lines).replace("forward", "on_validation_epoch_end")
    )
    assert finding.severity is Severity.NOTE
    text = forward("for x in self.cut(audio):", "    self.manual_backward(x)")
    (finding,) = found(tmp_path, "NP407", text)
    assert finding.severity is Severity.NOTE


def test_a_while_is_a_branch(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path,
        "NP401",
        forward("while lengths.max() > 0:", "    lengths = self.encoder(lengths)"),
    )
    assert "`lengths.max() > 0`" in finding.what


def test_generate_goes_on_by_itself_and_is_no_loop_of_the_code(tmp_path: Path) -> None:
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def answer(model, prompts):\n"
        "    model = FSDP(model)\n"
        "    return model.generate(prompts)\n"
    )
    (finding,) = found(tmp_path, "NP407", text)
    assert "model.generate" in finding.what
    assert "ends on each rank by itself" in finding.what
    assert finding.instead == "synced_gpus=True"
