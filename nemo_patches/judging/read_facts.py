"""Reads what another rank says, of itself or of all.

It is data: its types are checked, it is printed without control characters, and nothing of it is
evaluated.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from ..facts import RankFacts
from ..text import safe

REFUSALS = (TypeError, ValueError, AttributeError, KeyError, OverflowError)


def read_facts(content: Any) -> RankFacts | None:
    """Facts in which every field has the right type; None if one has not.

    What a rank with an older nemo_patches does not say is as by default; what a newer one says is
    passed over.
    """
    try:
        facts: RankFacts = read(RankFacts, content)
    except REFUSALS:
        return None
    return facts


def read(kind: Any, value: Any) -> Any:
    """One of this type, as annotated, from JSON data. Raises one of REFUSALS if it is none."""
    if is_dataclass(kind):
        make: Any = kind
        types = {field.name: field.type for field in fields(kind)}
        known = {name: one for name, one in value.items() if name in types}
        return make(**{name: read(types[name], one) for name, one in known.items()})
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return {safe(key): read(arguments[1], one) for key, one in value.items()}
    if get_origin(kind) is tuple:
        if arguments[-1] is ...:
            return tuple(read(arguments[0], one) for one in value)
        pairs = zip(arguments, value, strict=True)
        return tuple(read(argument, one) for argument, one in pairs)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError
    if kind is int and abs(value) >= 1 << 63:
        raise ValueError
    if kind is float and not -1 <= value < 1e12:
        raise ValueError
    return safe(value) if kind is str else value
