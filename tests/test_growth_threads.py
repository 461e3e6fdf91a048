"""What has grown privately: beside other threads, with buffers that are cast one by one, and after
its group.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import nemo_patches

LONG = 400
LOOKS = 2000
LAYERS = 18


def grown(**changes: Any) -> Any:
    torch.manual_seed(0)
    encoder = encoders.conformer(**changes).eval()
    with torch.no_grad():
        encoders.run(encoder, LONG)
    return encoder


def beside_other_threads() -> dict[str, int]:
    """What another thread sees wrong while one takes checkpoints and another one evaluates longer
    and longer input.
    """
    encoder = grown()
    positions: Any = encoder.pos_enc
    registered, shortest, over = (
        positions._buffers["pe"].shape,
        positions.pe.size(1),
        threading.Event(),
    )
    assert shortest > registered[1]

    def save() -> None:
        while not over.is_set():
            encoder.state_dict()
            encoder.train().eval()
            positions.note = "an attribute"

    def grow() -> None:
        length = encoder.max_audio_length
        while not over.is_set() and length < 4 * LONG:
            length += 1
            encoders.sync(encoder, length)

    threads = [threading.Thread(target=save), threading.Thread(target=grow)]
    wrong = {"small": 0, "grown among the buffers": 0, "registered": 0}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(LOOKS):
            wrong["small"] += positions.pe.size(1) < shortest
            wrong["grown among the buffers"] += (
                positions._buffers["pe"].shape != registered
            )
            wrong["registered"] += len(list(positions.named_buffers())) != 1
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    return wrong


def by_data(encoder: torch.nn.Module) -> None:
    """As FSDP's mixed precision, and DeepSpeed."""
    for buffer in encoder.buffers():
        buffer.data = buffer.data.to(torch.float64)


def one_by_one(encoder: torch.nn.Module) -> None:
    for module in encoder.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.half()


def there_and_grown(encoder: torch.nn.Module) -> None:
    one_by_one(encoder)
    encoders.sync(encoder, 2 * LONG)


CASTS: dict[str, Callable[[torch.nn.Module], None]] = {
    "by data": by_data,
    "one by one": one_by_one,
    "there and grown": there_and_grown,
}


def cast(name: str) -> dict[str, torch.Tensor]:
    encoder = grown()
    CASTS[name](encoder)
    return encoders.length_sized(encoder)


def mixed_precision() -> torch.Tensor:
    """FSDP over an encoder that has grown in a sanity check, with buffers in bfloat16."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    encoder = grown()
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(
        encoder, mixed_precision=precision, device_id=cpu, use_orig_params=True
    )
    with torch.no_grad():
        return encoders.run(model, LONG)


def growth(rank: int, size: int) -> dict[str, Any]:
    stock = {name: cast(name) for name in CASTS}
    expected = mixed_precision()
    nemo_patches.apply(timeout=60.0)
    dist.barrier()
    found: dict[str, Any] = {
        f"cast {name}": same(cast(name), stock[name]) for name in CASTS
    }
    found["mixed precision"] = torch.equal(mixed_precision(), expected)
    dist.barrier()
    nemo_patches.apply(sync="local")
    found["threads"] = beside_other_threads()
    deep, encoder = grown(n_layers=LAYERS), grown()
    eager = output(encoder)
    dist.barrier()
    dist.destroy_process_group()
    found["seconds of a call"] = min(seconds_of_a_call(deep) for _ in range(5))
    torch.compiler.reset()
    found["compiled"] = torch.equal(
        output(torch.compile(encoder, backend="eager", fullgraph=True)), eager
    )
    encoders.sync(encoder, 3 * LONG)
    found["grown on"] = (
        encoders.wrong_rows(encoder) == 0 and encoder.max_audio_length == 3 * LONG
    )
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    alike = all(one[path].dtype == other[path].dtype for path in one)
    return (
        one.keys() == other.keys()
        and alike
        and all(torch.equal(one[path], other[path]) for path in one)
    )


def output(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return encoders.run(module, LONG, seed=3)


def seconds_of_a_call(encoder: torch.nn.Module) -> float:
    began = time.perf_counter()
    for _ in range(200):
        encoders.sync(encoder, LONG)
    return (time.perf_counter() - began) / 200


@pytest.mark.one_nemo
def test_growth_beside_threads_and_casts_and_after_its_process_group() -> None:
    for result in run_ranks(growth, 2):
        found = dict(result.value)
        assert found.pop("threads") == {
            "small": 0,
            "grown among the buffers": 0,
            "registered": 0,
        }
        # Through a growth that grows nothing: 1 ms.
        assert found.pop("seconds of a call") < 1e-4
        assert all(found.values()), found
