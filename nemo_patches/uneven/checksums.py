"""Exact checksums of tensors: sums of their bits as integers, weighted by position, the same in any order.

Nothing waits for the device: sums and copy are enqueued on its present stream, and an event tells when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PART = 1 << 20  # elements per number; the sums need 16 bytes for each, 16 MiB in all
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and its multiples modulo 2^64 look random


def parts(tensor: torch.Tensor) -> int:
    """How many numbers a tensor has."""
    return -(-tensor.numel() * (2 if tensor.is_complex() else 1) // _PART)


class Checksums:
    """The numbers of tensors of one device; equal bits give equal numbers. Created on the training thread."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueues the sums, and the copy of them to this host."""
        device = tensors[0].device
        most = min(max(tensor.numel() for tensor in tensors) * 2, _PART)  # a complex one has two for each
        weights = torch.arange(1, most + 1, dtype=torch.int64, device=device).mul_(_STEP).bitwise_or_(1)
        sums = []
        for tensor in tensors:
            for part in torch.split(_bits(tensor), _PART):
                if part.numel():
                    sums.append((part * weights[: part.numel()]).sum())
        numbers = torch.stack(sums) if sums else weights[:0]
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
            self._numbers = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def are_done(self) -> bool:
        """Whether the device has finished them. Does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[int]:
        """The numbers, once they are done."""
        return [int(number) for number in self._numbers.tolist()]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of its elements, whatever their order in memory."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(_INTEGERS[real.element_size()])
