"""The training, validation and test sets in a config:
how they are read, and how long their longest input may be.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_patches.tools.doctor import inputs
from nemo_patches.tools.doctor.config import Config, Section, Value
from nemo_patches.tools.doctor.inputs import Draw, Inputs
from nemo_patches.tools.doctor.known_keys import TABLE
from nemo_patches.tools.doctor.trees import UNKNOWN, Keys, entries

ROLES = {"train_ds": "training", "validation_ds": "validation", "test_ds": "test"}
_KEYS = TABLE["sets"]
OF_LHOTSE_ALONE = tuple[str, ...](_KEYS["of_lhotse_alone"])
_LENGTHENING = TABLE["perturbations"]
_SLOWEST = 0.9  # what NeMo's perturbations have where no speed is given
_MOST_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Longest:
    """The longest input of a set, in seconds: inf where nothing limits it, None where it cannot be
    told.
    """

    seconds: float | None
    read: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset(Section):
    """One data set. outer: the section with the keys of all sets in it."""

    role: str

    def own(self, path: str, default: Any = None) -> Value:
        """Of a multi_config, some keys count only where they are set for all, others only in the
        set.
        """
        own = super().own(path, default)
        if self.outer is None:
            return own
        counts_outside = not own.given
        if self.outer.get("multi_config").on:
            counts_outside = path in _KEYS["of_all_sets"]
        return self.outer.get(path, default) if counts_outside else own

    def get(self, path: str, default: Any = None) -> Value:
        """speechlm2's DataModule ends all evaluation, whatever its config says. NeMo's models for
        CTC, RNNT and SSL shuffle a training set that does not say.
        """
        if (
            self.keys[0] == "data"
            and not self.training
            and path in _KEYS["ends_evaluation"]
        ):
            return Value(f"{self.where}.{path}", True, "default")
        if path == "shuffle":
            model = self.training and self.keys[0] == "model"
            default = model and not self.config.get("model.transf_decoder").given
        return self.own(path, "trng" if path == "shard_seed" else default)

    @property
    def training(self) -> bool:
        return self.role == "training"

    @property
    def used(self) -> bool:
        """Whether it has any input: NeMo leaves out a set whose manifest is null."""
        return bool(self.given((*_KEYS["inputs"], "_target_")))

    @property
    def reader(self) -> str:
        """Whose data loader reads it: "lhotse", "nemo", or "" where only the model's class would
        tell.

        Lhotse is asked for with use_lhotse, or by what only it reads; speechlm2, with its sets in
        `data`, has no other.
        """
        switch = self.get("use_lhotse")
        if not switch.known or self.get("_target_").given:
            return ""
        if switch.given:
            return "lhotse" if switch.value else "nemo"
        if self.given(OF_LHOTSE_ALONE) or self.keys[0] == "data":
            return "lhotse"
        return "" if any(self.get(key).given for key in _KEYS["of_lhotse"]) else "nemo"

    @property
    def lhotse(self) -> bool:
        """Whether Lhotse reads it, for certain."""
        return self.reader == "lhotse"

    @property
    def nemo(self) -> bool:
        """Whether NeMo's own data loader reads it, for certain."""
        return self.reader == "nemo"

    @cached_property
    def inputs(self) -> Inputs:
        """How Lhotse reads its inputs, of which map or iterable can be forced; the sampler draws,
        too, with shuffle.
        """
        one_by_one = self.keys[0] != "data" and not self.training
        given = inputs.of_set(self, one_by_one=one_by_one)
        shuffle = self.get("shuffle")
        if shuffle.value not in (False, None):
            draw = Draw(self.get("shard_seed"), certain=shuffle.on)
            given = replace(given, draws=(*given.draws, draw))
        to_map = self.get("force_map_dataset")
        to_iterable = self.get("force_iterable_dataset")
        for switch, stream in ((to_iterable, True), (to_map, False)):
            if not switch.known:
                unknown = f"{switch.key} is not known"
                given = replace(given, stream=None, unknown=unknown)
            elif switch.value:
                given = replace(given, stream=stream)
        if to_map.on and to_iterable.on:
            both = f"{to_map.key} and {to_iterable.key} exclude each other"
            given = replace(given, unknown=both)
        return given

    @property
    def tarred(self) -> bool | None:
        """Whether it is read as a stream, as tar files are; None where the config does not tell."""
        if not self.nemo:
            return self.inputs.stream
        switch = self.get("is_tarred", False).value
        return None if switch is UNKNOWN else bool(switch)

    @property
    def shares_tar_files(self) -> bool:
        """Whether NeMo gives each rank tar files of its own."""
        strategy = self.get("tarred_shard_strategy", "scatter").value
        return self.nemo and bool(self.tarred) and strategy == "scatter"

    @property
    def endless(self) -> bool | None:
        """Whether Lhotse repeats it for ever: a stream, or what is mixed of several inputs, without
        force_finite.
        """
        return self.lhotse and self.inputs.endless

    @property
    def own_orders(self) -> tuple[Value, ...]:
        """The seeds with which each rank shuffles a non-streamed set on its own, then takes its
        share.
        """
        shared = self.tarred is False and self.endless is False
        if not self.lhotse or self.inputs.unknown or not shared:
            return ()
        seeds = [draw.seed for draw in self.inputs.draws if draw.certain]
        return tuple(dict.fromkeys(seed for seed in seeds if seed.value == "trng"))

    @property
    def dynamic(self) -> list[Value]:
        """What makes its batches differ in size."""
        return self.given(("batch_duration", "bucket_batch_size"))

    def given(self, keys: Iterable[str]) -> list[Value]:
        return [value for value in map(self.get, keys) if value.value is not None]

    def entries(self, at_most: int) -> int | None:
        """How many its manifest has, counted up to a number; None where it is no file of lines on
        this machine, or Lhotse reads another input in its place.
        """
        manifest = self.get("manifest_filepath")
        if not manifest.named or self.given(OF_LHOTSE_ALONE) or at_most > _MOST_ENTRIES:
            return None
        try:
            if not Path(manifest.value).is_file():
                return None
            with open(manifest.value, "rb") as file:
                lines = (line for line in file if line.strip())
                return sum(1 for _ in islice(lines, at_most))
        except (OSError, ValueError):
            return None

    def longest(self) -> Longest:
        """By its limits, and by what makes audio longer after them."""
        # Of diarization; a negative one is the whole recording.
        session = self.get("session_len_sec")
        if self.nemo and session.given:
            whole = session.number is not None and session.number < 0
            return Longest(math.inf if whole else session.number, (session,))
        limits = [self.get("max_duration", math.inf if self.lhotse else None)]
        limits += [limit for limit in map(self.get, _KEYS["shortening"]) if limit.given]
        seconds = _smallest(limits)
        switched = self.get("is_code_switched")
        if switched.value or not self.get("augmentor").known:
            return Longest(None, (*limits, switched))
        longer = list(self._lengthening())
        for value, lengthened in longer:
            known = seconds is not None and value.number is not None
            seconds = lengthened(seconds or 0.0, value.number or 0.0) if known else None
        return Longest(seconds, (*limits, *(value for value, _ in longer)))

    def _lengthening(self) -> Iterator[tuple[Value, Callable[[float, float], float]]]:
        """Values, each with what it makes of a length in seconds."""
        if self.get("concatenate_samples").value:
            factor = self.get("concatenate_duration_factor", 1.0)
            yield factor, lambda seconds, number: seconds * max(1.0, number)
        given = {} if self.lhotse else self.get("augmentor").value
        perturbations = given if isinstance(given, dict) else {}
        for name in _LENGTHENING["stretching"]:
            if perturbations.get(name) is not None:
                rate = self.get(f"augmentor.{name}.min_speed_rate", _SLOWEST)
                yield rate, _slowed
        for end in _LENGTHENING["silences"]:
            if perturbations.get("silence") is not None:
                yield self.get(f"augmentor.silence.{end}", 0), operator.add
        if self.get("random_padding").value:
            yield self.get("random_padding.max_total_duration"), max


def _slowed(seconds: float, rate: float) -> float:
    return seconds / min(1.0, rate) if rate > 0 else math.inf


def found_in(config: Config) -> Iterator[Dataset]:
    """Every set in the config, those inside a set one by one."""
    for keys, section in config.mappings():
        role = ROLES.get(keys[-1]) if keys else None
        if role is None:
            continue
        inner = _inside(section)
        if not inner:
            yield Dataset(config, keys, role=role)
        outer = Section(config, keys)
        for path in inner:
            yield Dataset(config, (*keys, *path), outer, role=role)


def _inside(section: Mapping[str, Any]) -> list[Keys]:
    """Where a section has its sets, if not in itself: several of speechlm2 or MagpieTTS, those of
    Lhotse's multi_config, or the one of another TTS model.
    """
    several = entries(section.get("datasets"))
    if several:
        return [("datasets", key) for key, each in several if isinstance(each, dict)]
    if section.get("multi_config") is True:
        sets = entries({**section, "sampler_weights": None})
        return [(key,) for key, each in sets if isinstance(each, dict)]
    for key in ("dataset", "dataloader_params"):
        inner = section.get(key)
        if isinstance(inner, dict):
            switch = inner.get("use_lhotse", section.get("use_lhotse"))
            if switch or inner.keys() & {"_target_", *OF_LHOTSE_ALONE}:
                return [(key,)]
    return []


def _smallest(limits: list[Value]) -> float | None:
    """The smallest of some limits: inf where each is null or infinite, None where that cannot be
    told.
    """
    numbers = [limit.number for limit in limits if limit.number is not None]
    if numbers:
        # NP125: no entry is that short.
        return min(numbers) if min(numbers) > 0 else None
    endless = all(limit.value in (None, math.inf) for limit in limits)
    return math.inf if endless else None
