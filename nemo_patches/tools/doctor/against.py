"""A config against the one that NeMo publishes for that kind of model, or any other:
what differs and matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import report
from nemo_patches.tools.doctor.config import Config, Value
from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.examination import Examination
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import UNKNOWN, Keys
from nemo_patches.tools.doctor.yaml_text import LOADER

NOT_SET = "not set"  # as references.yaml has it, too
# Sections of a model of which every setting matters.
_WHOLE = ("encoder", "preprocessor", "joint")


@cache
def facts() -> dict[str, dict[str, Any]]:
    """What references.yaml has: settings by the name of a config; and `defaults`, what NeMo or
    Lightning takes where a setting of an encoder, preprocessor, set or trainer is not there.

    Of a set and a trainer it has every setting that matters. alone: of other sections, by the whole
    path.
    """
    path = Path(__file__).with_name("references.yaml")
    read: dict[str, dict[str, Any]] = yaml.load(path.read_text("utf-8"), Loader=LOADER)
    return read


def reference(name: str) -> Mapping[str, Any]:
    """The settings of a config by its name in references.yaml, or of a file. Raises DoctorError."""
    names = [key for key in facts() if key != "defaults"]
    if name in names:
        return facts()[name]
    if not os.path.exists(name):
        raise DoctorError(
            f"--against {name!r} is not allowed; allowed: a file, {', '.join(names)}"
        )
    return dict(settings(reading.load(Path(name))))


def compared(each: Examination, *, name: str, other: Mapping[str, Any]) -> Examination:
    """Add how a config differs from another one, printed before the findings."""
    if each.config is None:
        return each
    found = list(differences(each.config, other))
    lines = [f"{each.name}: {len(found)} settings that matter differ from {name}"]
    for own, there in found:
        mine = str(own) if own.given else f"{own.key}: {NOT_SET}"
        theirs = "null" if there is None else there
        if own.key not in other and there != NOT_SET:
            theirs = f"{theirs}, the default"
        lines.append(f"    {mine}; there: {theirs}")
    details = [
        {"key": own.key, "value": report.plain(own.value), "there": there}
        for own, there in found
    ]
    return replace(
        each, lines=tuple(lines), details={"against": name, "differences": details}
    )


def differences(
    config: Config, other: Mapping[str, Any]
) -> Iterator[tuple[Value, Any]]:
    """What differs, in the order of the config, and what it is there; values that only the job
    will know differ from none. A set or a joint that the config lacks is no difference.
    """
    own = dict(settings(config))
    for key in {**own, **other}:
        default = _default(tuple(key.split(".")))
        mine = own.get(key, default)
        theirs = other.get(key, default)
        section = config.get(key.rpartition(".")[0])
        if mine != theirs and UNKNOWN not in (mine, theirs) and section.given:
            yield config.get(key), theirs


def settings(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that matter, by their path."""
    for keys, section in config.mappings():
        for key, value in section.items():
            if not isinstance(value, dict) and _matters((*keys, key)):
                yield ".".join((*keys, key)), value


def _matters(keys: Keys) -> bool:
    *section, key = keys
    defaults = facts()["defaults"]
    if section == ["trainer"]:
        return key in defaults["trainer"]
    if section[:2] == ["trainer", "strategy"] or ".".join(keys) in defaults["alone"]:
        return True
    if any(name in ROLES for name in section):
        return key in defaults["set"]
    return section[:1] == ["model"] and any(name in _WHOLE for name in section)


def _default(keys: Keys) -> Any:
    """What holds where a setting is not there: null for all that is not listed."""
    defaults = facts()["defaults"]
    section = keys[-2] if len(keys) > 1 else ""
    if section not in ("encoder", "preprocessor", "trainer"):
        section = "set" if any(name in ROLES for name in keys) else "alone"
    return defaults["alone"].get(".".join(keys), defaults[section].get(keys[-1]))
