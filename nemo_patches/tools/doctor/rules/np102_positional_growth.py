"""The longest possible input against the positional encodings: whether the encoder may have to grow them.

They start with pos_emb_max_len frames, counted before subsampling, and grow at the first longer input. Where ranks grow
differently, DDP's broadcast of buffers overwrites rows without an error, or aborts the job.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/3304
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.datasets import Dataset, Longest
from nemo_patches.tools.doctor.encoders import FLAG, Encoder, Frames
from nemo_patches.tools.doctor.finding import Change, Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.ERROR


@dataclass(frozen=True)
class _Inputs:
    """What the sets can give to one encoder: those with more frames than its room, those without a limit, others."""

    frames: Frames | None
    beyond: tuple[tuple[Dataset, Longest, int], ...]
    unlimited: tuple[Dataset, ...]
    untold: tuple[Dataset, ...]
    most: int
    read: tuple[Value, ...]


def check(job: Job) -> Iterator[Finding]:
    """For each encoder that can grow, where several ranks' buffers are broadcast."""
    if not job.overwrites_buffers or not job.datasets:
        return
    for encoder in job.encoders:
        if encoder.grows and encoder.room.number is not None and encoder.flag.known:
            yield from _of(job, encoder, int(encoder.room.number), _inputs(job, encoder))


def _inputs(job: Job, encoder: Encoder) -> _Inputs:
    frames, room = encoder.frames(), encoder.room.number or 0
    beyond, unlimited, untold, most = [], [], [], 0
    read = [encoder.flag, encoder.room, *(frames.read if frames else ())]
    for dataset in job.datasets:
        longest = dataset.longest()
        read += longest.read
        if longest.seconds is None or (frames is None and math.isfinite(longest.seconds)):
            untold.append(dataset)
        elif math.isinf(longest.seconds):
            unlimited.append(dataset)
        elif frames is not None:
            count = frames.of(longest.seconds)
            most = max(most, count)
            if count > room:
                beyond.append((dataset, longest, count))
    return _Inputs(
        frames, tuple(beyond), tuple(unlimited), tuple(untold), most, (*read, job.strategy, job.broadcast_buffers)
    )


def _of(job: Job, encoder: Encoder, room: int, inputs: _Inputs) -> Iterator[Finding]:
    name = f"{encoder.where} ({encoder.name})"
    if inputs.beyond and inputs.frames:
        sets = ", ".join(f"{dataset.where} {longest.seconds:g} s" for dataset, longest, _ in inputs.beyond)
        what = (
            f"{name}: an input may have {inputs.most} frames ({sets}), and its positional encodings start with {room} "
            f"({room * inputs.frames.hop / inputs.frames.rate:g} s, as frames count before subsampling). "
        )
        change = Change((*encoder.keys, "pos_emb_max_len"), inputs.most)
        instead = f"pos_emb_max_len: {inputs.most}, which changes no number that the model computes"
        if inputs.unlimited:
            instead += f"; and a max_duration for {_names(inputs.unlimited)}"
        if job.patched:
            yield Finding(
                Severity.NOTE,
                what + "With nemo_patches each rank grows its own, which is safe",
                inputs.read,
                instead,
                change,
            )
        elif not encoder.syncs:
            what += f"With {FLAG} off each rank grows by its own input, and DDP then overwrites rows or aborts the job"
            instead += f"; or {FLAG}: true; or nemo_patches"
            yield Finding(Severity.ERROR, what, inputs.read, instead, change)
        else:
            what += (
                f"All ranks grow alike as long as each makes the same calls, so {FLAG} must stay on: off, or with a "
                "call more on one rank, DDP overwrites rows or aborts the job"
            )
            yield Finding(Severity.WARNING, what, inputs.read, instead, change)
    elif inputs.unlimited or inputs.untold:
        open_sets = f"nothing limits {_names(inputs.unlimited)}" if inputs.unlimited else ""
        if not open_sets:
            open_sets = f"the config does not tell how long {_names(inputs.untold)} may be, in frames of this encoder"
        what = f"{name}: {open_sets}, and its positional encodings start with {room} frames"
        instead = "a max_duration that fits, also where the limit seems implied by the data"
        if not job.patched and not encoder.syncs:
            what += f"; with {FLAG} off a longer input on one rank makes DDP overwrite rows or abort the job"
            yield Finding(Severity.WARNING, what, inputs.read, f"{instead}; or {FLAG}: true; or nemo_patches")
        elif not job.patched and inputs.unlimited:
            yield Finding(Severity.NOTE, f"{what}: keep {FLAG} on", inputs.read, instead)
    elif not encoder.syncs:
        what = f"{name}: {FLAG} is off, and safe: no input has more than {inputs.most} frames, the room is {room}"
        yield Finding(Severity.NOTE, what, inputs.read)


def _names(sets: tuple[Dataset, ...]) -> str:
    return " and ".join(dataset.where for dataset in sets)
