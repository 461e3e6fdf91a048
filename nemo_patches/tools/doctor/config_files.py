"""Which files a run examines: files, folders, patterns, and - for the standard input."""

from __future__ import annotations

import glob
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
        for path in _matching(text):
            if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
                inside = list(_inside(path))
                configs = [each for each in inside if _may_be_a_config(each)]
                if not configs:
                    raise DoctorError(
                        f"{path}: no config in this folder; expected YAML with model,"
                        " trainer or data"
                    )
                paths += configs
                passed_over += len(inside) - len(configs)
            else:
                paths.append(path)
    return list(dict.fromkeys(paths)), passed_over


def of_hydra(
    config_path: str | None, config_name: str | None, config_dir: str | None
) -> list[str]:
    """The config that a training script's own options name, as they are pasted from its command.
    Raises DoctorError.

    Hydra takes --config-path relative to the training script, which the doctor does not know: to
    it, it is relative to the folder in which it was started.
    """
    if config_name is None:
        for option, value in (
            ("--config-path", config_path),
            ("--config-dir", config_dir),
        ):
            if value is not None:
                raise DoctorError(
                    f"found {option} {value} without --config-name; expected both, or"
                    " the config's path"
                )
        return []
    name = config_name if config_name.endswith(_ENDINGS) else f"{config_name}.yaml"
    folders = [
        folder for folder in (config_path, config_dir) if folder is not None
    ] or ["."]
    for folder in folders:
        if os.path.isfile(path := os.path.join(folder, name)):
            return [path]
    looked_in = " or ".join(os.path.abspath(folder) for folder in folders)
    raise DoctorError(
        f"--config-name {config_name}: no {name} in {looked_in}; Hydra takes"
        " --config-path relative to the training script, the doctor relative to this"
        " folder: give the config's own path"
    )


def read(path: Path) -> YamlText:
    if path != STANDARD_INPUT:
        return yaml_text.read(path)
    content = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
    return yaml_text.decoded(Path("<stdin>"), content)


def _matching(text: str) -> list[Path]:
    if not text:
        raise DoctorError(
            "found an empty argument; expected a file, a folder, a pattern, or -"
        )
    if not glob.has_magic(text) or os.path.lexists(text):
        return [Path(text)]
    matching = sorted(
        Path(name) for name in glob.glob(text, recursive=True) if os.path.isfile(name)
    )
    if not matching:
        raise DoctorError(f"{text}: no file matches this pattern")
    return matching


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
