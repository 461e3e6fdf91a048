"""The lengths of a batch, copied to the host without waiting: on a GPU they arrive when the stream gets there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

MOST_LENGTHS = 256  # of one batch; of a larger one the first
_NOT_YET = torch.iinfo(torch.int64).min


class LengthsCopies:
    """Copies of this process, in buffers that are used again; on a GPU the buffers are pinned.

    Whether a copy has come is read off the buffer, which holds _NOT_YET until then. To ask CUDA for an event on another
    thread would break a graph that the training thread captures meanwhile, and so may freeing pinned memory there.
    """

    def __init__(self) -> None:
        self._free: dict[bool, deque[torch.Tensor]] = {False: deque(), True: deque()}  # by whether they are pinned

    def begin(self, lengths: torch.Tensor | None) -> Callable[[], tuple[int, int] | None] | None:
        """On the training thread. What is returned gives the shortest and the longest, or None as long as the copy has
        not come; call it on one thread until it has. None where there are no values to be had without a wait.
        """
        # A subclass may have no values at all (FakeTensor).
        if lengths is None or type(lengths) is not torch.Tensor or not lengths.numel():
            return None
        if lengths.device.type not in ("cpu", "cuda") or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        free = self._free[lengths.is_cuda]
        buffer = free.popleft() if free else _new_buffer(lengths.is_cuda)
        count = min(lengths.numel(), MOST_LENGTHS)
        copied = buffer[:count].fill_(_NOT_YET)
        copied.copy_(lengths.detach().flatten()[:count], non_blocking=True)

        def shortest_and_longest() -> tuple[int, int] | None:
            values = copied.tolist()
            if _NOT_YET in values:
                return None
            free.append(buffer)
            return min(values), max(values)

        return shortest_and_longest


@torch.inference_mode(False)  # else it could not be written to outside of one
def _new_buffer(pinned: bool) -> torch.Tensor:
    return torch.empty(MOST_LENGTHS, dtype=torch.int64, device="cpu", pin_memory=pinned)
