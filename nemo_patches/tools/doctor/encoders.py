"""The encoders in a config whose length sync is known, and how many frames each may get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_patches.tools.doctor.config import Config, Section, Value
from nemo_patches.tools.doctor.known_keys import ENCODERS, TABLE, WITHOUT_SYNC
from nemo_patches.tools.doctor.syntax import last_part

FLAG = "sync_max_audio_length"


# What each class with a length sync takes, by its name.
TAKEN: dict[str, frozenset[str]] = {
    name: frozenset(entry["keys"])
    for base, entry in ENCODERS.items()
    for name in (base, *entry["also"])
}

_NAMESAKES = tuple(TABLE["encoder_namesakes"])
_MEL = TABLE["mel_preprocessors"]


@dataclass(frozen=True)
class Frames:
    """How seconds become frames: `hop` samples each at `rate` Hz, `center` for one more, padded to
    `pad_to`.
    """

    rate: float
    hop: int
    center: bool
    pad_to: int
    read: tuple[Value, ...]

    def of(self, seconds: float) -> int:
        """The frames of that much audio, as the encoder gets them: before subsampling."""
        frames = int(seconds * self.rate) // self.hop + self.center
        return math.ceil(frames / self.pad_to) * self.pad_to if self.pad_to else frames


@dataclass(frozen=True, kw_only=True)
class Encoder(Section):
    """One encoder in a config, of a class of NeMo with a length sync."""

    name: str

    @property
    def has_flag(self) -> bool:
        """Whether it takes sync_max_audio_length."""
        return FLAG in TAKEN[self.name]

    @property
    def positional(self) -> bool:
        """Whether it has positional encodings that start at pos_emb_max_len and grow.

        ConvASREncoder has none, and as it always syncs, its other buffer grows alike everywhere.
        """
        return "pos_emb_max_len" in TAKEN[self.name]

    @property
    def flag(self) -> Value:
        """The effective sync_max_audio_length; true where the class does not have it."""
        if not self.has_flag:
            return Value(f"{self.where}.{FLAG}", True, "default")
        return self.get(FLAG, True)

    @property
    def syncs(self) -> bool:
        """Whether it reduces its length over all ranks: Python's truth of the flag, and true where
        it is not known.
        """
        return bool(self.flag.value)

    @property
    def grows(self) -> bool:
        """Whether it has positional encodings that grow."""
        attention = self.get("self_attention_model", "rel_pos").value
        return self.positional and attention not in TABLE["attention"]["without_growth"]

    @property
    def max_len(self) -> Value:
        """For how many frames there are positional encodings at the start."""
        return self.get("pos_emb_max_len", 5000)

    def frames(self) -> Frames | None:
        """How audio becomes this encoder's frames, by the nearest preprocessor beside it or a
        section that holds it; None where the config does not tell.
        """
        # It gets another encoder's output.
        if any("adapter" in key for key in self.keys):
            return None
        holders = [self.keys[:depth] for depth in reversed(range(len(self.keys)))]
        found = (
            _mel(Section(self.config, (*each, "preprocessor"))) for each in holders
        )
        return next(filter(None, found), None)


def _mel(mel: Section) -> Frames | None:
    """Of an AudioToMelSpectrogramPreprocessor, with NeMo's defaults."""
    target = last_part(str(mel.get("_target_").value))
    if target not in _MEL:
        return None
    rate = mel.get("sample_rate", 16000)
    stride = mel.get("window_stride", 0.01)
    hop = mel.get("n_window_stride")
    pad_to = mel.get("pad_to", 16 if target == _MEL[0] else 0)
    if rate.number is None or pad_to.number is None:
        return None
    samples = int(hop.number or rate.number * (stride.number or 0))
    if samples < 1:
        return None
    return Frames(
        rate=rate.number,
        hop=samples,
        center=not mel.get("exact_pad", False).on,
        pad_to=int(pad_to.number),
        read=(hop if hop.number else stride, pad_to),
    )


def found_in(config: Config) -> Iterator[Encoder]:
    """Every encoder in the config, however deep: pre_encoder, perception, teacher."""
    for keys, section in config.mappings():
        name = class_of(section.get("_target_"))
        if name:
            yield Encoder(config, keys, name=name)


def unknown_in(config: Config) -> Iterator[Value]:
    """The _target_ of every section in an encoder's place whose class is not known, with a length
    sync or without.
    """
    for keys, section in config.mappings():
        target = section.get("_target_")
        known = class_of(target) or last_part(str(target)) in WITHOUT_SYNC
        if (
            keys
            and keys[-1] in TABLE["encoder_places"]
            and isinstance(target, str)
            and not known
        ):
            yield config.get((*keys, "_target_"))


def class_of(target: object) -> str:
    """The class with a length sync that a _target_ names; empty for any other."""
    name = last_part(str(target))
    namesake = str(target).startswith(_NAMESAKES)
    return name if name in TAKEN and not namesake else ""
