"""A YAML file as OmegaConf reads it, with the place of each value; nothing in it is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import Keys, with_names

# libyaml where PyYAML was built with it, ten times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# NeMo's own configs have at most 40 KiB, one with a large vocabulary some 100 KiB
LARGEST_FILE_BYTES = 1 << 20
# Every alias counts as often as it is used; NeMo's own have up to 21,000
MOST_VALUES = 50_000
MOST_LEVELS = 50  # of mappings and sequences in each other
_MOST_DIGITS = 1000  # Python refuses to print more than some thousands
_MERGE = "tag:yaml.org,2002:merge"
_STRING, _INT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"


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
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise DoctorError(
                f"{path}: more than {LARGEST_FILE_BYTES} bytes; a config may have no more"
            )
        text = content.decode()
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
        _check_depth(text)
        loader = _loader(text)
        root = loader.get_single_node()
        if root is None or root.id != expected:
            what = f"the top level is a {root.id}" if root else "empty"
            raise DoctorError(f"{path}: {what}; expected a {expected}")
        built = loader.construct_document(root)
        places = list(islice(_places(root), MOST_VALUES + 1))
        if len(places) > MOST_VALUES:
            raise ValueError(
                f"more than {MOST_VALUES} values, when its aliases are followed"
            )
        tree = with_names(built)
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
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave each key once, as text, with the mapping's own after merged ones."""
        first: dict[str, yaml.Node] = {}
        for key, child in node.value:
            name = str(key.value)
            what = ""
            if key.tag != _MERGE and name in first:
                what = f"{name} is there twice, first in line {_line(first[name])}"
            elif child is node:
                what = "<< merges a mapping into itself"
            if what:
                raise yaml.constructor.ConstructorError(
                    problem=what, problem_mark=key.start_mark
                )
            first[name] = key
        super().flatten_mapping(node)
        node.value = list({str(pair[0].value): pair for pair in node.value}.values())
        for key, _ in node.value:
            key.tag = _STRING


def _loader(text: str) -> _Loader:
    from omegaconf import _utils  # 0.2 s, and a check of code needs none of it

    loader = _Loader(text)
    # OmegaConf 2.3 has no public name for them.
    loader.yaml_implicit_resolvers = _utils.get_yaml_loader().yaml_implicit_resolvers
    return loader


def _check_depth(text: str) -> None:
    """Before anything recursive sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_LEVELS:
            raise ValueError(
                f"nested deeper than {MOST_LEVELS}, in line {_line(event)}"
            )


def _line(node: yaml.Node | yaml.Event) -> int:
    return int(node.start_mark.line) + 1


def _places(
    node: yaml.Node, keys: Keys = (), line: int = 0
) -> Iterator[tuple[Keys, int, yaml.Node]]:
    """The path, the line and the node of each value; the line of one in a mapping is its key's.
    Raises ValueError for a value that leads on to itself, or cannot be printed.
    """
    if len(keys) > MOST_LEVELS:
        raise ValueError(f"nested deeper than {MOST_LEVELS}, in line {line}")
    if node.tag == _INT and len(node.value) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(node.value)} digits, in line {line}")
    yield keys, line, node
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield from _places(child, (*keys, key.value), _line(key))
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _places(child, (*keys, str(index)), _line(child))
