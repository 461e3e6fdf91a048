"""What a trace knows about an encoder: its number and name in the file, its last call, its DDP."""

from __future__ import annotations

import time
import weakref

import torch
from torch.utils.hooks import RemovableHandle

from nemo_patches.tracing.checks import EncoderChecks
from nemo_patches.tracing.encoder_facts import active_ddp, facts
from nemo_patches.tracing.records import Encoder


class EncoderState:
    """Written on the training thread."""

    def __init__(self, e: int, name: str, positions: int) -> None:
        self.e, self.name, self.positions = e, name, positions
        self.number = 0  # of the last call
        self.backwards = 0  # begun so far
        self.running = False  # a recorded call is
        self.checks: EncoderChecks | None = None
        self.ddp = False
        self.searched: weakref.ref[torch.nn.Module] | None = None
        self.ddp_forward = DdpForward()
        self.hook: RemovableHandle | None = None

    def facts(self, encoder: torch.nn.Module, t: float) -> Encoder:
        return facts(encoder, t, self.e, self.name, self.ddp)

    def is_now_inside_ddp(self, encoder: torch.nn.Module) -> bool:
        """Whether this is the first call seen within a DistributedDataParallel's forward. Each is searched once."""
        active = active_ddp()
        if self.ddp or active is None or (self.searched is not None and self.searched() is active):
            return False
        self.searched = weakref.ref(active)
        self.ddp = any(module is encoder for module in active.modules())
        if self.ddp:
            self.hook = active.register_forward_pre_hook(self.ddp_forward)
        return self.ddp

    def in_ddp(self) -> float | None:
        """Seconds that the DDP around this call has been in its forward; None in a second call of the same forward."""
        began, self.ddp_forward.began = self.ddp_forward.began, 0.0
        is_inside = self.searched is not None and self.searched() is active_ddp() is not None
        return round(time.monotonic() - began, 6) if began and is_inside else None

    def leave_ddp(self) -> None:
        if self.hook is not None:
            self.hook.remove()


class DdpForward:
    """A hook that notes when DDP's forward begins. On Gloo its first act is a broadcast, which waits for a late rank.

    It stays on the DDP, so it holds nothing that cannot be copied or pickled with it.
    """

    def __init__(self) -> None:
        self.began = 0.0  # time.monotonic(); 0 if that call is noted

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self.began = time.monotonic()
