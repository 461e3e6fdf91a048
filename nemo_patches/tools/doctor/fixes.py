"""Make the safe changes in the text of a config:
comments, order and everything else stay as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.config import Config
from nemo_patches.tools.doctor.finding import Change
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import put
from nemo_patches.tools.doctor.yaml_text import YamlText


def fixed(config: Config, changes: Sequence[Change]) -> tuple[str, list[str]]:
    """The config's text with the changes made, and why some were not.

    A change is left out where it would not do just what it says: the value comes from an override,
    or the text is read differently elsewhere after it, as with an anchor that others share.
    """
    source = config.source
    refused = []
    for change in changes:
        name = ".".join(change.keys)
        try:
            if any(change.keys[: len(given)] == given for given in config.overridden):
                raise _CannotBeMade("its value is that of an override")
            source = _with(source, change)
        except _CannotBeMade as reason:
            refused.append(
                f"{name}: {reason}; write it yourself: {_scalar(change.value)}"
            )
    return source.text, refused


def diff(path: Path, before: str, after: str) -> str:
    """A unified diff; empty if nothing changed."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        str(path),
        f"{path} (fixed)",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


class _CannotBeMade(Exception):
    """A change that would not do just what it says. The text says why."""


def _with(source: YamlText, change: Change) -> YamlText:
    try:
        after = yaml_text.parse(source.path, _changed(source, change))
    except DoctorError:
        raise _CannotBeMade("the text cannot be read after it") from None
    wanted = deepcopy(source.tree)
    put(wanted, change.keys, change.value)
    if after.tree != wanted:  # a style that was not foreseen
        raise _CannotBeMade("it would change other values, too")
    return after


def _changed(source: YamlText, change: Change) -> str:
    """The text with the value replaced, or inserted before the first key of its mapping: the only
    place whose indentation is certain.
    """
    text = source.text
    value = _scalar(change.value)
    node = source.nodes.get(change.keys)
    if isinstance(node, yaml.ScalarNode):
        return text[: node.start_mark.index] + value + text[node.end_mark.index :]
    if node is not None:
        raise _CannotBeMade(f"it is a {node.id} now")
    mapping = source.nodes.get(change.keys[:-1])
    if not isinstance(mapping, yaml.MappingNode):
        raise _CannotBeMade("there is no section for it")
    marks = [key.start_mark for key, _ in mapping.value]
    own = [mark for mark in marks if mark.index >= mapping.start_mark.index]
    if mapping.flow_style or not own:
        raise _CannotBeMade("its section is not written line by line")
    at = own[0].index
    newline = "\r\n" if "\r\n" in text else "\n"
    line = f"{change.keys[-1]}: {value}{newline}{' ' * own[0].column}"
    return text[:at] + line + text[at:]


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
