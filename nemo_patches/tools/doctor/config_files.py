"""Which files a run examines: files, folders, and - for the standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.config import SECTIONS
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.yaml_text import LARGEST_FILE_BYTES, YamlText

STANDARD_INPUT = Path("-")
_ENDINGS = (".yaml", ".yml")


def found(arguments: Iterable[str]) -> tuple[list[Path], int]:
    """The files of the command's arguments, and how many in folders were passed over. Raises
    DoctorError.
    """
    paths: list[Path] = []
    passed_over = 0
    for text in arguments:
        path = Path(text)
        if not text:
            raise DoctorError(
                "found an empty argument; expected a file, a folder, or -"
            )
        if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
            paths.append(path)
            continue
        inside = list(_inside(path))
        configs = [each for each in inside if _may_be_a_config(each)]
        if not configs:
            raise DoctorError(
                f"{path}: no config in this folder; expected YAML with model, trainer"
                " or data"
            )
        paths += configs
        passed_over += len(inside) - len(configs)
    return list(dict.fromkeys(paths)), passed_over


def read(path: Path) -> YamlText:
    if path != STANDARD_INPUT:
        return yaml_text.read(path)
    content = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
    return yaml_text.decoded(Path("<stdin>"), content)


def _inside(folder: Path) -> Iterator[Path]:
    """The YAML files of a folder and the folders below; hidden ones are left out."""
    for at, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            Path(at, name)
            for name in sorted(names)
            if name.endswith(_ENDINGS) and not name.startswith(".")
        )


def _refuse(error: OSError) -> NoReturn:
    """Raise for a folder that cannot be read: it may contain configs."""
    raise DoctorError(f"{error.filename}: {error.strerror}")


def _may_be_a_config(path: Path) -> bool:
    """Also true for a file that cannot be read: the examination then says so."""
    try:
        source = yaml_text.read(path)
    except DoctorError:
        return True
    return any((name,) in source.nodes for name in SECTIONS)
