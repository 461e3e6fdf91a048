"""What a name sounds like."""

from __future__ import annotations

import re
from functools import lru_cache

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.syntax import last_part


@lru_cache(maxsize=20_000)
def parts_of(name: str) -> frozenset[str]:
    """Its words, and its parts between dots, in small letters."""
    name = name.lower()
    return frozenset({*re.split(r"[\W_]+", name), *name.split(".")})


@lru_cache(maxsize=20_000)
def says(text: str, pattern: str) -> bool:
    """Whether a pattern is found in it; the same names and tests come again and again."""
    return re.search(pattern, text) is not None


def sounds_like_data(name: str) -> bool:
    parts = parts_of(last_part(name))
    return bool(parts & knowledge.DATA_NAMES) and not parts & knowledge.OTHER_NAMES


def is_loader(text: str) -> bool:
    return bool(parts_of(text) & knowledge.LOADED)
