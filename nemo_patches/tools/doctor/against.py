"""A config against the one that NeMo publishes for that kind of model, or any other:
what differs and matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.config import Config, Value
from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.interpolations import UNKNOWN
from nemo_patches.tools.doctor.trees import Keys
from nemo_patches.tools.doctor.yaml_text import LOADER

NOT_SET = "not set"
_REFERENCES = Path(__file__).with_name("references.yaml")

# Sections of a model of which every setting matters.
_WHOLE = ("encoder", "preprocessor", "joint")


@dataclass(frozen=True)
class Difference:
    """One setting that differs; `other` is the default where the other config leaves it to that."""

    own: Value
    other: Any
    is_default: bool

    def __str__(self) -> str:
        own = f"{self.own.key}: {NOT_SET}" if not self.own.given else str(self.own)
        other = "null" if self.other is None else self.other
        return f"{own}; there: {other}" + (
            ", the default" if self.is_default and other != NOT_SET else ""
        )


@cache
def _facts() -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = yaml.load(
        _REFERENCES.read_text("utf-8"), Loader=LOADER
    )
    return facts


def defaults(section: str) -> Mapping[str, Any]:
    """What NeMo or Lightning takes where a setting of an encoder, preprocessor, set or trainer is
    not there.

    Of a set and a trainer it has every setting that matters. alone: of other sections, by the whole
    path.
    """
    found: Mapping[str, Any] = _facts()["defaults"][section]
    return found


def reference(name: str) -> Mapping[str, Any]:
    """The settings of a config by its name in references.yaml, or of a file. Raises DoctorError."""
    references = {
        key: settings for key, settings in _facts().items() if key != "defaults"
    }
    if name in references:
        return references[name]
    if not os.path.exists(name):
        raise DoctorError(
            f"--against {name!r} is not allowed; allowed: a file, {', '.join(references)}"
        )
    return dict(settings(reading.load(Path(name))))


def differences(config: Config, other: Mapping[str, Any]) -> Iterator[Difference]:
    """What differs, in the order of the config; values that only the job will know differ from
    none.
    """
    own = dict(settings(config))
    for key in [*own, *(key for key in other if key not in own)]:
        default = _default(tuple(key.split(".")))
        mine = own.get(key, default)
        theirs = other.get(key, default)
        if mine != theirs and UNKNOWN not in (mine, theirs) and _is_there(config, key):
            yield Difference(config.get(key), theirs, key not in other)


def settings(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that matter, by their path."""
    for keys, section in config.mappings():
        for key, value in section.items():
            if not isinstance(value, dict) and _matters(keys, key):
                yield ".".join((*keys, key)), value


def _matters(keys: Keys, key: str) -> bool:
    if keys == ("trainer",):
        return key in defaults("trainer")
    if keys[:2] == ("trainer", "strategy") or ".".join((*keys, key)) in defaults(
        "alone"
    ):
        return True
    if any(name in ROLES for name in keys):
        return key in defaults("set")
    return bool(keys) and keys[0] == "model" and any(name in _WHOLE for name in keys)


def _default(keys: Keys) -> Any:
    """What holds where a setting is not there: null for all that is not listed."""
    path = ".".join(keys)
    if path in defaults("alone"):
        return defaults("alone")[path]
    section = keys[-2] if len(keys) > 1 else ""
    if section in ("encoder", "preprocessor", "trainer"):
        return defaults(section).get(keys[-1])
    return (
        defaults("set").get(keys[-1]) if any(name in ROLES for name in keys) else None
    )


def _is_there(config: Config, key: str) -> bool:
    """Whether the config has the section at all: a set or a joint that it lacks is no difference in
    a setting.
    """
    return config.get(key.rpartition(".")[0]).given
