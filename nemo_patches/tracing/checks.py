"""The opt-in checks around an encoder call:
its inputs, asynchronous errors of the device, and missing ranks.

What they find is logged; nothing is raised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nemo_patches.sync import length_sync
from nemo_patches.sync.length_sync import EncoderSync, LengthSyncTimeout
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.sync.settings import BARRIER, CUDA, INPUTS
from nemo_patches.text import first_line


@dataclass(frozen=True)
class EncoderInputs:
    """An encoder call's inputs. signal: batch first. frames: of the signal; None where that has no
    such dimension.
    """

    signal: torch.Tensor | None
    lengths: torch.Tensor | None
    frames: int | None


@dataclass(frozen=True)
class CheckFinding:
    """What a check found. `kind` identifies the problem: it is counted, and not logged every
    time.
    """

    check: str
    kind: str
    text: str


class EncoderChecks:
    """The checks of one encoder, with what they have found so far. On the training thread."""

    def __init__(
        self, words: tuple[str, ...], encoder: torch.nn.Module, title: str
    ) -> None:
        self._words = words
        self._encoder = encoder
        self._title = title
        self._counts: Counter[tuple[str, str]] = Counter()
        self._without_effect: set[str] = set()
        self._barrier: EncoderSync | None = None

    def before(self, inputs: EncoderInputs, call: int) -> None:
        """`inputs` and `cuda` wait for the device, `barrier` waits for the ranks."""
        if CUDA in self._words:
            self._say(
                call,
                self._synchronize(
                    inputs, "before the encoder: an earlier operation has failed"
                ),
            )
        if INPUTS in self._words:
            self._say(call, self._looked_at(inputs))
        if BARRIER in self._words:
            self._say(call, self._meet(inputs))

    def after(self, inputs: EncoderInputs, call: int) -> None:
        if CUDA in self._words:
            self._say(call, self._synchronize(inputs, "in the encoder"))

    def _say(self, call: int, found: Iterator[CheckFinding]) -> None:
        """Log the first, 10th, 100th ... time that each kind is found for this encoder."""
        for one in found:
            self._counts[one.check, one.kind] += 1
            times = self._counts[one.check, one.kind]
            if times == 10 ** (len(str(times)) - 1):
                count = f" (found {times} times)" if times > 1 else ""
                text = (
                    f"{self._title}: call {call}: check {one.check}: {one.text}{count}"
                )
                report(logging.WARNING, text)

    def _say_once(self, text: str) -> None:
        """A check that has no effect here, and why."""
        if text not in self._without_effect:
            self._without_effect.add(text)
            report(logging.INFO, f"{self._title}: {text}")

    def _meet(self, inputs: EncoderInputs) -> Iterator[CheckFinding]:
        sync = length_sync.sync_of(self._encoder)
        if sync is None:
            self._say_once(
                "check barrier: does nothing, there is no other rank to wait for"
            )
            return
        barrier = self._barrier_beside(sync)
        if barrier.why_over:
            return
        bounded = replace(length_sync.current(), sync="bounded", on_timeout="raise")
        try:
            barrier.take_part(inputs.frames or 0, self._encoder.training, bounded)
        except LengthSyncTimeout:
            who = "who is missing, a stall report says"
            if barrier.why_over:
                yield CheckFinding(
                    BARRIER,
                    "ended",
                    f"the barrier has ended: {barrier.why_over}; {who}",
                )
            else:
                yield CheckFinding(
                    BARRIER,
                    "missing",
                    f"not every rank came to this call in time; {who}",
                )

    def _barrier_beside(self, sync: EncoderSync) -> EncoderSync:
        """A separate sync before the length sync: a rank that waits in it has finished all its
        earlier work.
        """
        if self._barrier is None or self._barrier.group_syncs is not sync.group_syncs:
            self._barrier = EncoderSync(
                title=f"{sync.title}, barrier",
                key=f"{sync.key}-barrier",
                group_syncs=sync.group_syncs,
                late_text="not every rank came within {waited:.2f} s",
            )
            self._barrier.serve(self._encoder)
        return self._barrier

    def _looked_at(self, inputs: EncoderInputs) -> Iterator[CheckFinding]:
        """Waits once for the device, twice more if something is found."""
        signal, lengths, frames = inputs.signal, inputs.lengths, inputs.frames
        if signal is None:
            self._say_once("check inputs: does nothing, its signal is no tensor")
            return
        yield from _look_at_devices(self._encoder, signal, lengths)
        batch = signal.shape[0] if signal.ndim else 0
        if lengths is not None and (lengths.ndim != 1 or lengths.shape[0] != batch):
            yield CheckFinding(
                INPUTS,
                "batch",
                f"a batch of {batch}, but lengths of shape {list(lengths.shape)}",
            )
        comparable = (
            lengths is not None
            and frames is not None
            and lengths.device == signal.device
        )
        try:
            not_finite, beyond = _values(
                signal, lengths if comparable else None, frames or 0
            )
            nan, infinite = _count(signal) if not_finite else (0, 0)
            longest = lengths.max().item() if lengths is not None and beyond else 0
        except RuntimeError as error:
            if raised_by_signal_handler(error):
                raise
            yield CheckFinding(
                INPUTS, "unreadable", f"the input cannot be read: {first_line(error)}"
            )
            return
        if not_finite:
            text = (
                f"the signal has {nan} NaN and {infinite} Inf among {signal.numel()}"
                " values"
            )
            yield CheckFinding(INPUTS, "NaN" if nan else "Inf", text)
        if beyond:
            text = (
                f"the longest length is {longest}, beyond the signal's {frames} frames"
            )
            yield CheckFinding(INPUTS, "lengths", text)

    def _synchronize(self, inputs: EncoderInputs, where: str) -> Iterator[CheckFinding]:
        if inputs.signal is None or not inputs.signal.is_cuda:
            self._say_once(
                "check cuda: does nothing for an input that is not on a CUDA device"
            )
            return
        try:
            torch.cuda.synchronize(inputs.signal.device)
        except RuntimeError as error:
            if raised_by_signal_handler(error):
                raise
            yield CheckFinding(CUDA, where, f"{where}: {first_line(error)}")


@torch.no_grad()
def _values(
    signal: torch.Tensor, lengths: torch.Tensor | None, frames: int
) -> tuple[bool, bool]:
    """Whether some value is not finite, and whether some length is beyond the signal: one wait for
    the device.
    """
    trouble = [~torch.isfinite(signal).all()]
    if lengths is not None:
        trouble.append((lengths > frames).any())
    not_finite, *beyond = torch.stack(trouble).tolist()
    return not_finite, any(beyond)


@torch.no_grad()
def _count(signal: torch.Tensor) -> tuple[int, int]:
    nan, infinite = torch.stack([signal.isnan().sum(), signal.isinf().sum()]).tolist()
    return nan, infinite


def _look_at_devices(
    encoder: torch.nn.Module, signal: torch.Tensor, lengths: torch.Tensor | None
) -> Iterator[CheckFinding]:
    """Checks that need no look at the values."""
    if lengths is not None and lengths.device != signal.device:
        text = f"the signal is on {signal.device}, its lengths are on {lengths.device}"
        yield CheckFinding(INPUTS, "lengths' device", text)
    weight = next(
        (weight for weight in encoder.parameters() if weight.is_floating_point()), None
    )
    if weight is None:
        return
    if weight.device != signal.device:
        yield CheckFinding(
            INPUTS,
            "device",
            f"the signal is on {signal.device}, the weights are on {weight.device}",
        )
    if weight.dtype != signal.dtype and not torch.is_autocast_enabled(
        signal.device.type
    ):
        text = (
            f"the signal is {signal.dtype}, the weights are {weight.dtype}, without"
            " autocast"
        )
        yield CheckFinding(INPUTS, "dtype", text)
