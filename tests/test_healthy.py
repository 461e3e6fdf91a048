"""Where every rank is in step, nothing differs from stock, bit for bit, on any rank and for each
target class.
"""

from __future__ import annotations

import random
from typing import Any

import encoders
import pytest
import torch
from ranks import CONNECTING_S, run_ranks

import nemo_patches

STEPS = 20


def train(rank: int, name: str) -> tuple[list[Any], Any]:
    """DDP training with lengths beyond the positional encoding, and some evaluation; everything
    that could differ.
    """
    torch.manual_seed(0)
    encoder = encoders.makers()[name]()
    trainable = name not in encoders.FORWARD_ONLY
    model = torch.nn.parallel.DistributedDataParallel(encoder) if trainable else encoder
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    chance = random.Random(rank)
    record: list[Any] = []
    torch.manual_seed(rank)
    for step in range(STEPS):
        with torch.set_grad_enabled(trainable):
            encoded = encoders.run(
                model, chance.randint(40, 400), seed=step * 10 + rank
            )
        loss = encoded.pow(2).mean()
        if trainable:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        record += [encoder.max_audio_length, loss.item(), encoded.detach().clone()]
        record += [
            parameter.grad.clone()
            for parameter in encoder.parameters()
            if parameter.grad is not None
        ]
        record += [tensor.clone() for tensor in encoders.length_sized(encoder).values()]
        if step % 10 == 9:
            encoder.eval()
            with torch.no_grad():
                for batch in range(3):
                    record += [
                        encoders.run(encoder, chance.randint(40, 900), seed=batch),
                        encoder.max_audio_length,
                    ]
            encoder.train()
    record += [tensor.clone() for tensor in encoder.state_dict().values()]
    return record, next(iter(nemo_patches.status().encoders), None)


def stock_and_patched(rank: int, size: int) -> dict[str, Any]:
    differences = {}
    for name in encoders.makers():
        stock, _ = train(rank, name)
        nemo_patches.apply(timeout=CONNECTING_S)
        patched, counters = train(rank, name)
        nemo_patches.revert()
        pairs = zip(stock, patched, strict=True)
        differences[name] = (
            len(stock),
            [i for i, pair in enumerate(pairs) if not same(*pair)],
            counters,
        )
    return differences


def same(one: Any, other: Any) -> bool:
    return (
        torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
    )


@pytest.mark.matrix
def test_bit_identical_to_stock() -> None:
    for result in run_ranks(stock_and_patched, 2, limit=400):
        assert set(result.value) == set(encoders.makers())
        for name, (compared, different, counters) in result.value.items():
            assert compared > STEPS * 4, name
            assert different == [], name
            assert (counters.calls, counters.rounds, counters.fallbacks) == (
                STEPS + 6,
                STEPS + 6,
                0,
            ), name
        assert result.lines("WARNING") == result.lines("ERROR") == []
