"""The target that apply() does not import itself: patched when it is imported, as stock in step,
and never a wrong row.

The model is real, but bare: no language model and no audio encoder, only what its length sync and
padding mask need.
"""

from __future__ import annotations

import importlib
from typing import Any

import encoders
import pytest
import torch
from ranks import CONNECTING_S, run_ranks

import nemo_patches
from nemo_patches.patching.targets import TARGETS

(TARGET,) = [
    target
    for target in TARGETS
    if (target.module, target.owner) == encoders.PUNCTUATION
]
BUILT_FOR = 1024  # as in the model's own __init__
# In audio samples, by step and rank.
LENGTHS = [(100, 200), (5000, 3000), (3000, 7000), (50, 50)]


class Training(torch.nn.Module):
    """What the model's own forward does with a length, and one parameter for DDP."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = samples.size(1)
        self.model.update_max_seq_length(seq_length=length, device=samples.device)
        mask = self.model.make_pad_mask(length, torch.tensor([length, length // 2]))
        return self.model.audio_proj(samples[:, :1]), mask


def train(rank: int) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
    """The model after all steps, and of each step its max_audio_length and padding mask."""
    model = encoders.punctuation(BUILT_FOR)
    parallel = torch.nn.parallel.DistributedDataParallel(Training(model))
    steps = []
    for lengths in LENGTHS:
        out, mask = parallel(torch.ones(2, lengths[rank]))
        out.sum().backward()
        steps.append((model.max_audio_length, mask))
    return model, steps


def late_import(rank: int, size: int) -> None:
    nemo_patches.apply()
    reasons = {
        skipped.target: skipped.reason for skipped in nemo_patches.status().skipped
    }
    assert "not imported yet" in reasons[str(TARGET)]
    importlib.import_module(TARGET.module)
    assert str(TARGET) in nemo_patches.status().patched
    nemo_patches.revert()
    _, stock = train(rank)

    nemo_patches.apply(timeout=CONNECTING_S)
    model, patched = train(rank)
    for (maximum, mask), (stocks_maximum, stocks_mask) in zip(
        patched, stock, strict=True
    ):
        assert maximum == stocks_maximum
        assert torch.equal(mask, stocks_mask)
    assert len(model.seq_range) == 7000
    assert len(model._buffers["seq_range"]) == BUILT_FOR  # what DDP has collected
    nemo_patches.revert()
    assert len(model._buffers["seq_range"]) == 7000

    nemo_patches.apply(sync="local")
    model, uneven = train(rank)
    assert (
        model.max_audio_length
        == len(model.seq_range)
        == max(lengths[rank] for lengths in LENGTHS)
    )
    assert encoders.wrong_rows(model) == 0
    assert all(
        torch.equal(mask, stocks_mask)
        for (_, mask), (_, stocks_mask) in zip(uneven, stock, strict=True)
    )


@pytest.mark.matrix
@pytest.mark.skipif(
    TARGET.source_file() is None, reason=f"this NeMo has no {TARGET.owner}"
)
def test_it_is_patched_when_it_is_imported_and_grows_privately_to_stocks_length() -> (
    None
):
    for result in run_ranks(late_import, 2):
        assert result.lines("WARNING") == []
