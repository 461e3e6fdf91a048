"""Stands where nemo_patches would be, so that the same tests drive a vendored NeMo beside which it is not importable.

Its `apply` only chooses the settings: the diffs have done the rest. `nemo_patches.sync` and, where it is vendored too,
`nemo_patches.stall` are the vendored ones. `nemo_patches.tools` is the checkout's, whose demo drives a training and
patches nothing itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
from nemo.collections.asr.parts import nemo_patches as vendored
from nemo.collections.asr.parts.nemo_patches import CheckpointError as CheckpointError
from nemo.collections.asr.parts.nemo_patches.sync import length_sync
from nemo.collections.asr.parts.nemo_patches.sync.settings import Settings

# Nothing else of the real package is importable from here, not even through an editable installation of it.
__path__: list[str] = []
sys.meta_path[:] = [finder for finder in sys.meta_path if "nemo_patches" not in getattr(finder, "__module__", "")]
for module in pkgutil.walk_packages(vendored.__path__, f"{vendored.__name__}."):
    inner = module.name.removeprefix(f"{vendored.__name__}.")
    sys.modules[f"nemo_patches.{inner}"] = importlib.import_module(module.name)
subscriber = sys.modules.get("nemo_patches.stall.subscriber")  # None beside the core alone
tools = sys.modules["nemo_patches.tools"] = ModuleType("nemo_patches.tools")
tools.__path__ = [str(Path(__file__).parents[3] / "nemo_patches" / "tools")]
# The environment has an editable installation, whose entry point Lightning calls; without nemo_patches there is none.
trainer_callbacks = sys.modules["nemo_patches.patching.trainer_callbacks"] = ModuleType("trainer_callbacks")
vars(trainer_callbacks)["callbacks"] = list

if "sctypes" not in vars(numpy):  # NeMo 2.1 to 2.3 read audio by it, and run beside a NumPy that does not have it
    numpy.sctypes = {"int": [numpy.int16, numpy.int32], "float": [numpy.float32, numpy.float64]}


@dataclass(frozen=True)
class Status:
    """What the tests read of the real one's."""

    settings: Settings
    encoders: tuple[Any, ...]
    unannounced: tuple[int, ...]
    stalls: tuple[Any, ...]


def apply(
    sync: str | None = None,
    timeout: float | None = None,
    on_timeout: str | None = None,
    stall_timeout: float | None = None,
) -> None:
    given = dict(locals())
    length_sync.use(Settings.resolve(given))
    if subscriber:
        subscriber.use(importlib.import_module("nemo_patches.stall.settings").StallSettings.resolve(given))


def status() -> Status:
    unannounced = subscriber.unannounced() if subscriber else ()
    return Status(length_sync.current(), vendored.counters(), unannounced, vendored.stalls())


def revert() -> None:
    """A diff cannot be taken back in a process; the next test case starts from the default settings."""
    length_sync.use(Settings())
