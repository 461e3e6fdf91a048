"""Read the files that an input_cfg names, with bounds.

Their inputs take the place of their names, as in NeMo.

NeMo opens such a name in the folder where the job runs (whatever the config's folder is), so the
doctor looks for it in the folder where it was started. A file's interpolations are its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.tools.doctor import interpolations, yaml_text
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.interpolations import Resolved
from nemo_patches.tools.doctor.trees import Keys, entries
from nemo_patches.tools.doctor.yaml_text import MOST_VALUES, WrongKindError, YamlText

KEY = "input_cfg"
_SECTIONS = ("model", "data")  # that hold data sets
_DEEPEST = 10  # files that name each other
# S3://, ais://, https://, pipe:; not a drive's letter.
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True)
class Unread:
    """Why a file is not there. refused: NeMo stops at what is in it, too."""

    why: str
    refused: bool


def read_into(
    tree: Any, found: Resolved
) -> tuple[dict[Keys, YamlText], dict[Keys, Unread]]:
    """Put the inputs of every file that a config's tree names into it, in place, and what their
    interpolations are into `found`. Returns what was read and what was not, by the path of the
    input_cfg that names it. Never raises."""
    files: dict[Keys, YamlText] = {}
    unread: dict[Keys, Unread] = {}
    read: dict[str, tuple[YamlText, Any, Resolved]] = {}
    room = MOST_VALUES
    waiting = [
        (inner, 1)
        for section in _SECTIONS
        for inner in _named(tree.get(section), (section,))
    ]
    while waiting:
        (keys, holder), depth = waiting.pop(0)
        name = holder[KEY]
        try:
            if depth > _DEEPEST:
                raise DoctorError(f"{name}: more than {_DEEPEST} files in each other")
            if name not in read:
                read[name] = _read(name)
            source, content, resolved = read[name]
            room -= len(source.nodes)
            if room < 0:
                raise DoctorError(
                    f"{name}: more than {MOST_VALUES} values in all such files"
                )
        except DoctorError as error:
            unread[keys] = Unread(str(error), isinstance(error, WrongKindError))
            continue
        holder[KEY] = deepcopy(content)
        files[keys] = source
        found.broken.update(
            {(*keys, *inner): why for inner, why in resolved.broken.items()}
        )
        found.of_machine.update((*keys, *inner) for inner in resolved.of_machine)
        waiting += [(inner, depth + 1) for inner in _named(holder[KEY], keys)]
    return files, unread


def _read(name: str) -> tuple[YamlText, Any, Resolved]:
    if _ELSEWHERE.match(name):
        raise DoctorError(f"{name} is not on this machine")
    if not os.path.exists(name):  # Path.exists raises for a name that is too long
        raise DoctorError(
            f"{name} is not on this machine (looked for in {Path.cwd()}, as NeMo does"
            " where the job runs)"
        )
    source = yaml_text.read(Path(name), "sequence")
    content = deepcopy(source.tree)
    return source, content, interpolations.resolve(source, content)


def _named(node: Any, keys: Keys) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Every mapping below whose input_cfg is the name of a file, with the path of that
    input_cfg.
    """
    waiting = [(keys, node)]
    while waiting:
        here, each = waiting.pop()
        if isinstance(each, dict) and isinstance(each.get(KEY), str):
            yield (*here, KEY), each
        waiting += [((*here, key), child) for key, child in entries(each)]
