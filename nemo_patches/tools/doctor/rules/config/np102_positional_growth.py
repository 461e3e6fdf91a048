"""The longest possible input, compared with the positional encodings:
whether the encoder may have to grow them.

They start with pos_emb_max_len frames, counted before subsampling, and grow at the first longer
input. If ranks grow differently, DDP's broadcast of buffers overwrites rows without an error, or
aborts the job.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/3304
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.datasets import Dataset, Longest
from nemo_patches.tools.doctor.encoders import FLAG, Encoder, Frames
from nemo_patches.tools.doctor.finding import (
    ERROR,
    Change,
    Finding,
    Findings,
    error,
    note,
    stops,
    warning,
)
from nemo_patches.tools.doctor.job import Job

WORST = ERROR
BAD = """\
trainer: {devices: 4, strategy: ddp}
model:
  train_ds: {manifest_filepath: a.json, batch_size: 8, max_duration: 60}
  preprocessor: {_target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor}
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder, sync_max_audio_length: false}
"""
GOOD = BAD.replace("sync_max_audio_length: false", "pos_emb_max_len: 6016")

_POSITIONAL = ("rel_pos", "abs_pos", "rel_pos_local_attn")


@dataclass(frozen=True)
class _Inputs:
    """What the sets can give to one encoder: those with more frames than its room, those without a
    limit, others.
    """

    frames: Frames | None
    beyond: tuple[tuple[Dataset, Longest], ...]
    unlimited: tuple[Dataset, ...]
    untold: tuple[Dataset, ...]
    most: int
    read: tuple[Value, ...]


def check(job: Job) -> Findings:
    """For each encoder that can grow, where several ranks' buffers are broadcast; a room that is
    none, on any rank.
    """
    for encoder in job.encoders:
        yield from _no_room(encoder)
    if not job.overwrites_buffers or not job.datasets:
        return
    for encoder in job.encoders:
        if (
            encoder.grows
            and encoder.room.number is not None
            and encoder.room.number > 0
        ):
            yield from _of(job, encoder, _inputs(job, encoder))


def _no_room(encoder: Encoder) -> Findings:
    """What the encoder cannot make positional encodings of."""
    attention = encoder.get("self_attention_model", "rel_pos").value
    if (
        not encoder.room.known
        or not encoder.cls
        or not encoder.cls.positional
        or attention not in _POSITIONAL
    ):
        return
    room = 1.0 if encoder.room.on else encoder.room.number
    if room is None or room < 0 or (not room and attention == "rel_pos"):
        what = (
            f"{encoder.room.key} is {encoder.room.value!r}, which is no number of"
            " frames"
        )
        yield stops(
            what,
            encoder.room,
            "pos_emb_max_len: as many frames as the longest input has",
        )


def _inputs(job: Job, encoder: Encoder) -> _Inputs:
    frames = encoder.frames()
    room = encoder.room.number or 0
    beyond: list[tuple[Dataset, Longest]] = []
    unlimited: list[Dataset] = []
    untold: list[Dataset] = []
    most = 0
    read = [encoder.flag, encoder.room, *(frames.read if frames else ())]
    for dataset in job.datasets:
        longest = dataset.longest()
        read += longest.read
        if longest.seconds is None or (
            frames is None and math.isfinite(longest.seconds)
        ):
            untold.append(dataset)
        elif math.isinf(longest.seconds):
            unlimited.append(dataset)
        elif frames is not None:
            count = frames.of(longest.seconds)
            most = max(most, count)
            if count > room:
                beyond.append((dataset, longest))
    read += (job.strategy, job.broadcast_buffers)
    return _Inputs(
        frames=frames,
        beyond=tuple(beyond),
        unlimited=tuple(unlimited),
        untold=tuple(untold),
        most=most,
        read=tuple(read),
    )


def _of(job: Job, encoder: Encoder, inputs: _Inputs) -> Findings:
    name = f"{encoder.where} ({encoder.name})"
    room = int(encoder.room.number or 0)
    if inputs.beyond and inputs.frames:
        what = f"{name}: {_beyond(inputs, inputs.frames, room)}"
        yield _reachable(job, encoder, inputs=inputs, what=what)
    elif inputs.unlimited or inputs.untold:
        if not job.patched:
            yield from _open(encoder, f"{name}: {_left_open(inputs, room)}", inputs)
    elif not encoder.syncs:
        what = (
            f"{name}: {FLAG} is off, and safe: no input has more than {inputs.most}"
            f" frames, the room is {room}"
        )
        yield note(what, inputs.read)


def _reachable(job: Job, encoder: Encoder, *, inputs: _Inputs, what: str) -> Finding:
    change = Change((*encoder.keys, "pos_emb_max_len"), inputs.most)
    instead = (
        f"pos_emb_max_len: {inputs.most}, which changes no number that the model"
        " computes"
    )
    if inputs.unlimited:
        instead += f"; and a max_duration for {_names(inputs.unlimited)}"
    if job.patched:
        what += "With nemo_patches each rank grows its own, which is safe"
        return note(what, inputs.read, instead, change=change)
    if not encoder.syncs:
        what += (
            f"With {FLAG} off each rank grows by its own input, and DDP then overwrites"
            " rows or aborts the job"
        )
        return error(
            what,
            inputs.read,
            f"{instead}; or {FLAG}: true; or nemo_patches",
            change=change,
        )
    if not encoder.flag.known:
        what += (
            f"{FLAG} is {encoder.flag.value}: if off, DDP overwrites rows or aborts the"
            " job; if on, so does"
        )
        what += " a call more on one rank"
        return warning(what, inputs.read, instead, change=change)
    what += (
        "All ranks grow alike as long as each makes the same calls; with a call more on"
        " one rank"
    )
    what += f", or {FLAG} off," if encoder.cls and encoder.cls.has_flag else ""
    return note(
        f"{what} DDP overwrites rows or aborts the job",
        inputs.read,
        instead,
        change=change,
    )


def _open(encoder: Encoder, what: str, inputs: _Inputs) -> Findings:
    instead = "a max_duration that fits, also where the limit seems implied by the data"
    if not encoder.syncs:
        what += (
            f"; with {FLAG} off a longer input on one rank makes DDP overwrite rows or"
            " abort the job"
        )
        yield warning(what, inputs.read, f"{instead}; or {FLAG}: true; or nemo_patches")
    elif inputs.unlimited and encoder.cls and encoder.cls.has_flag:
        yield note(f"{what}: keep {FLAG} on", inputs.read, instead)


def _beyond(inputs: _Inputs, frames: Frames, room: int) -> str:
    sets = ", ".join(
        f"{dataset.where} {longest.seconds:g} s" for dataset, longest in inputs.beyond
    )
    return (
        f"an input may have {inputs.most} frames ({sets}), and its positional encodings"
        f" start with {room} ({room * frames.hop / frames.rate:g} s, as frames count"
        " before subsampling). "
    )


def _left_open(inputs: _Inputs, room: int) -> str:
    if inputs.unlimited:
        what = f"nothing limits {_names(inputs.unlimited)}"
    else:
        what = (
            f"the config does not tell how long {_names(inputs.untold)} may be, in"
            " frames of this encoder"
        )
    return f"{what}, and its positional encodings start with {room} frames"


def _names(sets: tuple[Dataset, ...]) -> str:
    return " and ".join(dataset.where for dataset in sets)
