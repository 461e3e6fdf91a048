"""Frames of tracebacks and dumps: whether they are the user's own code, and their text."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from nemo_patches.text import safe

_SHOWN_FRAMES = 3
_LONGEST = 300
_FRAMEWORKS = re.compile(
    r"/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)|^<|"
    r"/(?:site|dist)-packages/(?:torch|torchrun|ray|lightning\w*|pytorch_lightning|nemo|"
    r"hydra|accelerate|deepspeed|transformers|wrapt|contextlib|decorator|lightning_utilities)/"
)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<")


# py-spy and others print a file's path within its folder of sys.path.
_SHORT_PACKAGES = sys.stdlib_module_names | {
    "torch",
    "nemo",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "torchvision",
    "torchaudio",
    "torchdata",
    "accelerate",
    "deepspeed",
    "peft",
    "ray",
    "transformers",
    "trl",
    "lhotse",
    "wrapt",
    "hydra",
}


def is_library(file: str) -> bool:
    package = file.partition("/")[0].removesuffix(".py")
    return package in _SHORT_PACKAGES or _LIBRARY.search(file) is not None


def where(frames: Sequence[tuple[str, str, str]]) -> str:
    """Of file, line and function of each, innermost first: the innermost frame, and the user's own
    that led to it.

    Code may be installed as a package: where no frame is of a file outside of packages, those count
    that are of no framework; where there is none either, the next ones.
    """
    others = frames[1:]
    own = [frame for frame in others if not is_library(frame[0])]
    own = own or [frame for frame in others if not _FRAMEWORKS.search(frame[0])]
    chosen = [*frames[:1], *(own or others)[: _SHOWN_FRAMES - 1]]
    return " < ".join(
        safe(shown(function, file, line), _LONGEST) for file, line, function in chosen
    )


def shown(function: str, file: str, line: str | int, folders: int = 0) -> str:
    """ "read (data.py:41)"; with one of its folders: "read (my_asr/data.py:41)"."""
    return f"{function} ({'/'.join(file.split('/')[-1 - folders :])}:{line})"
