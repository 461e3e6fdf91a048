"""A YAML file as OmegaConf reads it, with the place of each value; nothing in it is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import _utils

from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.trees import Keys, with_names

# libyaml where PyYAML was built with it, ten times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class YamlText:
    """The text of one file, its values (every key as text), and the node and the line of each."""

    path: Path
    text: str
    tree: Any
    nodes: dict[Keys, yaml.Node]
    lines: dict[Keys, int]

    def line(self, keys: Keys) -> int | None:
        """The line, from 1, of that key, or of the nearest one that holds it; None where there is
        none.
        """
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines[keys] if keys else None


def read(path: Path, expected: str = "mapping") -> YamlText:
    """Read one file. Raises DoctorError for whatever is not a YAML mapping (or sequence, if that is
    expected) of plain values."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe may never end
            raise DoctorError(f"{path}: not a regular file; expected a YAML file")
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DoctorError(
            f"{path}: not text: byte {error.start} is not UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # a name with a null byte
        raise DoctorError(f"{path}: {getattr(error, 'strerror', error)}") from None
    return parse(path, text, expected)


def parse(path: Path, text: str, expected: str = "mapping") -> YamlText:
    """The same for a text; path: the name to use for it."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or root.id != expected:
            what = f"the top level is a {root.id}" if root else "empty"
            raise DoctorError(f"{path}: {what}; expected a {expected}")
        tree = with_names(loader.construct_document(root))
        places = list(_places(root))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise DoctorError(f"{path}{place}: cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise DoctorError(f"{path}: cannot be read: {error}") from None
    return YamlText(
        path=path,
        text=text,
        tree=tree,
        nodes={keys: node for keys, _, node in places},
        lines={keys: line for keys, line, _ in places},
    )


class _Loader(LOADER):  # type: ignore[misc]
    """PyYAML's, with OmegaConf's own rules on what is a number, and on keys that are there twice;
    OmegaConf's loader is ten times as slow.

    OmegaConf 2.3 has no public name for them.
    """

    yaml_implicit_resolvers = _utils.get_yaml_loader().yaml_implicit_resolvers

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave each key once, as text, with the mapping's own after merged ones."""
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            name = str(key.value)
            if key.tag != _MERGE and name in first:
                what = f"{name} is there twice, first in line {_line(first[name])}"
                raise yaml.constructor.ConstructorError(
                    problem=what, problem_mark=key.start_mark
                )
            first[name] = key
        super().flatten_mapping(node)
        node.value = list({str(pair[0].value): pair for pair in node.value}.values())
        for key, _ in node.value:
            key.tag = _STRING


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _places(
    node: yaml.Node, keys: Keys = (), line: int = 0
) -> Iterator[tuple[Keys, int, yaml.Node]]:
    """The path, the line and the node of each value; the line of one in a mapping is its key's."""
    yield keys, line, node
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield from _places(child, (*keys, key.value), _line(key))
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _places(child, (*keys, str(index)), _line(child))
