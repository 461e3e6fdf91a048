"""Reads what another rank says of itself.

It is data: its types are checked, its size is bounded, it is printed without control characters,
and nothing of it is evaluated.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from ..facts import MOST_ENCODERS, MOST_WORKERS, RankFacts
from ..text import safe


def read_facts(content: Any, has_place: bool = True) -> RankFacts | None:
    """Facts in which every field has the right type; None if one has not.

    has_place: whether its rank's place is that of all ranks whose facts were merged with it. What a
    rank with an older nemo_patches does not say is as by default; what a newer one says is passed
    over.
    """
    checks = {one.name: _CHECKS[str(one.type)] for one in fields(RankFacts)}
    try:
        facts = RankFacts(
            **{
                name: checks[name](value)
                for name, value in content.items()
                if name in checks
            }
        )
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None
    if has_place:
        return facts
    return replace(
        facts, where="", caller="", hook="", workers=(), worker_states=(), batch=""
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return safe(value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not -1 <= value < 1e12:
        raise TypeError
    return float(value)


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _by_encoder(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {
        _text(key): check(each) for key, each in list(value.items())[:MOST_ENCODERS]
    }


_CHECKS: dict[str, Callable[[Any], Any]] = {  # by a field's annotation
    "bool": _yes_or_no,
    "int": _whole,
    "str": _text,
    "float": _seconds,
    "tuple[int, ...]": lambda value: tuple(map(_whole, list(value)[:MOST_WORKERS])),
    "tuple[str, ...]": lambda value: tuple(map(_text, list(value)[:MOST_WORKERS])),
    "dict[str, str]": _by_encoder(_text),
    "dict[str, int]": _by_encoder(_whole),
    "dict[str, float]": _by_encoder(_seconds),
}
