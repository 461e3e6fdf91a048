"""Resolve the interpolations of a YAML file's values by OmegaConf, without a resolver's call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import UNKNOWN, Keys, place, put, walk, with_names
from nemo_patches.tools.doctor.yaml_text import YamlText

_MISSING = "???"  # OmegaConf's word for a value that is still to be given
_OF_MACHINE = "\0of the job's machine\0"  # stands for what a resolver would give
# ${name:arguments}, also with an interpolation as the name.
_RESOLVER = re.compile(r"\$\{(?:[^{}:]|\{[^{}]*\})*:")
_CIRCLE = "leads back to itself, or through too many others"


@dataclass
class Resolved:
    """broken: the interpolations that lead nowhere, and why. of_machine: the values that a resolver
    would give.
    """

    broken: dict[Keys, str] = field(default_factory=dict)
    of_machine: set[Keys] = field(default_factory=set)
    _followed: list[int] = field(default_factory=list)  # the sections around this value

    def value(self, holder: Any, key: Any, keys: Keys) -> Any:
        """What OmegaConf gives there; keys: those of the interpolation that is followed."""
        try:
            value = holder[key]
            if id(value) in self._followed:
                raise RecursionError
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            return UNKNOWN
        except (OmegaConfBaseException, RecursionError) as error:
            circle = isinstance(error, RecursionError) or "recursion" in str(error)
            self.broken[keys] = _CIRCLE if circle else first_line(error)
            return UNKNOWN
        if isinstance(value, (DictConfig, ListConfig)):
            self._followed.append(id(value))
            if isinstance(value, DictConfig):
                tree: Any = {str(k): self.value(value, k, keys) for k in value}
            else:
                tree = [self.value(value, at, keys) for at in range(len(value))]
            self._followed.pop()
            return tree
        if isinstance(value, str) and _OF_MACHINE in value:
            self.of_machine.add(keys)
            return UNKNOWN
        return value


def resolve(source: YamlText, tree: Any) -> Resolved:
    """Replace every interpolation in a tree of this file's values, in place, and put UNKNOWN where
    it cannot be told.

    Those that name a key are followed. A resolver is never called. Raises DoctorError.
    """
    texts = [
        (keys, node)
        for keys, node in walk(tree)
        if node == _MISSING or (isinstance(node, str) and "${" in node)
    ]
    resolved = Resolved()
    if not texts:
        return resolved
    masked = with_names(tree)
    for keys, text in texts:
        try:
            OmegaConf.create([text])
        except (OmegaConfBaseException, RecursionError) as error:
            where = f"{source.path}:{source.line(keys)}: {'.'.join(keys)}"
            raise DoctorError(
                f"{where} is no interpolation: {first_line(error)}"
            ) from None
        if _RESOLVER.search(text):
            put(masked, keys, _OF_MACHINE)
    whole = OmegaConf.create(masked)
    for keys, _ in texts:
        holder, key = place(whole, keys)
        put(tree, keys, resolved.value(holder, key, keys))
    return resolved


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
