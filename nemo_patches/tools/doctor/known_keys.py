"""The keys and names that NeMo 2.1 to 3.0 and Lightning 2 know:
the facts are in known_keys.yaml.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor.yaml_text import LOADER

TABLE: dict[str, Any] = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8"), Loader=LOADER
)
TRAINER = frozenset[str](TABLE["trainer"])
TRAINER_1: dict[str, str] = TABLE["trainer_of_lightning_1"]
EXP_MANAGER = frozenset[str](TABLE["exp_manager"])
ENCODERS: dict[str, dict[str, list[str]]] = TABLE["encoders"]
WITHOUT_SYNC = tuple[str, ...](TABLE["encoders_without_sync"])
STRATEGY_CLASSES = tuple[str, ...](TABLE["strategy_classes"])
DDP_STRATEGY = frozenset[str](TABLE["ddp_strategy"])


def closest(name: str, known: Collection[str], likeness: float = 0.85) -> str:
    """The known name that a misspelt one is most like, by difflib's ratio; empty if it is like
    none.
    """
    return next(iter(get_close_matches(name, known, n=1, cutoff=likeness)), "")
