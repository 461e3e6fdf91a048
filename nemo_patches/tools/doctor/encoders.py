"""The encoders in a config whose length sync is known, and how many frames each may get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_patches.tools.doctor import known_keys
from nemo_patches.tools.doctor.config import Config, Section, Value
from nemo_patches.tools.doctor.syntax import last_part
from nemo_patches.tools.doctor.trees import Keys

FLAG = "sync_max_audio_length"


@dataclass(frozen=True)
class EncoderClass:
    """A class of NeMo with a length sync. keys: what the class takes that the sync is of."""

    name: str
    keys: frozenset[str]

    @property
    def has_flag(self) -> bool:
        """Whether it takes sync_max_audio_length."""
        return FLAG in self.keys

    @property
    def positional(self) -> bool:
        """Whether it has positional encodings that start at pos_emb_max_len and grow.

        ConvASREncoder has none, and as it always syncs, its other buffer grows alike everywhere.
        """
        return "pos_emb_max_len" in self.keys


_CLASSES = {
    name: EncoderClass(name, frozenset(entry["keys"]))
    for base, entry in known_keys.ENCODERS.items()
    for name in (base, *entry["also"])
}

_PLACES = ("encoder", "pre_encoder", "teacher")

# Other classes of the same name, without a length sync.
_NAMESAKES = (
    "nemo.collections.asr.modules.transformer.",
    "nemo.collections.nlp.",
    "torch.",
    "transformers.",
)

# Their positional encodings never grow, or are not there.
_WITHOUT_GROWTH = ("rel_pos_local_attn", "no_pos", None)

_MEL = ("AudioToMelSpectrogramPreprocessor", "AudioToMFCCPreprocessor")


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


@dataclass(frozen=True)
class Encoder(Section):
    """One encoder in a config."""

    cls: EncoderClass

    @property
    def name(self) -> str:
        return self.cls.name

    @property
    def flag(self) -> Value:
        """The effective sync_max_audio_length; true where the class does not have it."""
        if not self.cls.has_flag:
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
        return self.cls.positional and attention not in _WITHOUT_GROWTH

    @property
    def max_len(self) -> Value:
        """For how many frames there are positional encodings at the start."""
        return self.get("pos_emb_max_len", 5000)

    def frames(self) -> Frames | None:
        """How audio becomes this encoder's frames; None where the config does not tell."""
        # It gets another encoder's output.
        if any("adapter" in key for key in self.keys):
            return None
        for depth in range(len(self.keys) - 1, -1, -1):
            holder = self.keys[:depth]
            frames = self._mel(holder)
            if frames:
                return frames
        return None

    def _mel(self, holder: Keys) -> Frames | None:
        """From AudioToMelSpectrogramPreprocessor beside it, with NeMo's defaults."""
        mel = Section(self.config, (*holder, "preprocessor"))
        target = _class_name(mel.get("_target_").value)
        if target not in _MEL:
            return None
        rate = mel.get("sample_rate", 16000)
        stride = mel.get("window_stride", 0.01)
        hop = mel.get("n_window_stride")
        exact = mel.get("exact_pad", False)
        pad_to = mel.get("pad_to", 16 if target == _MEL[0] else 0)
        if (
            rate.number is None
            or (hop.number or stride.number) is None
            or pad_to.number is None
        ):
            return None
        samples = int(hop.number or rate.number * float(stride.number or 0))
        if samples < 1:
            return None
        return Frames(
            rate=rate.number,
            hop=samples,
            center=not exact.on,
            pad_to=int(pad_to.number),
            read=(hop if hop.number else stride, pad_to),
        )


def found_in(config: Config) -> Iterator[Encoder]:
    """Every encoder in the config, however deep: pre_encoder, perception, teacher."""
    for keys, section in config.mappings():
        cls = class_of(section.get("_target_"))
        if cls:
            yield Encoder(config, keys, cls)


def unknown_in(config: Config) -> Iterator[Value]:
    """The _target_ of every section in an encoder's place whose class is not known, with a length
    sync or without.
    """
    for keys, section in config.mappings():
        target = section.get("_target_")
        known = (
            class_of(target) is not None
            or _class_name(target) in known_keys.WITHOUT_SYNC
        )
        if keys and keys[-1] in _PLACES and isinstance(target, str) and not known:
            yield config.get((*keys, "_target_"))


def class_of(target: object) -> EncoderClass | None:
    """The class that a _target_ names, None for any without a length sync that is known."""
    if not isinstance(target, str) or target.startswith(_NAMESAKES):
        return None
    return _CLASSES.get(_class_name(target))


def _class_name(target: object) -> str:
    return last_part(target) if isinstance(target, str) else ""
