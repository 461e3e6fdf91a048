"""A YAML file as OmegaConf reads it, with the place of each value; nothing in it is executed."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import _utils

from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.trees import Keys

# libyaml where PyYAML was built with it, ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# NeMo's own configs have at most 40 KiB, one with a large vocabulary some 100 KiB
LARGEST_FILE_BYTES = 1 << 20
# Every alias counts as often as it is used; NeMo's own have up to 21,000
MOST_VALUES = 50_000
MOST_LEVELS = 50  # of mappings and sequences in each other
_MOST_BITS = 4096  # of a number: Python refuses to print those with thousands of digits

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "seq", "map")
)


@dataclass(frozen=True)
class YamlText:
    """The text of one file, its values (every key as text), and the node of every key in it
    (`key_nodes`) and of every value (`nodes`).
    """

    path: Path
    text: str
    tree: Any
    nodes: dict[Keys, yaml.Node]
    key_nodes: dict[Keys, yaml.Node]

    def line(self, keys: Keys) -> int | None:
        """The line, from 1, of that key, or of the nearest one that holds it; None where there is
        none.
        """
        while keys:
            node = self.key_nodes.get(keys) or self.nodes.get(keys)
            if node is not None:
                return _line(node)
            keys = keys[:-1]
        return None


def read(path: Path, expected: str = "mapping") -> YamlText:
    """Read one file. Raises DoctorError for whatever is not a YAML mapping (or sequence, if that is
    expected) of plain values."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
            what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise DoctorError(f"{path}: {what}; expected a YAML file")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte
        raise DoctorError(f"{path}: {getattr(error, 'strerror', error)}") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise DoctorError(
            f"{path}: more than {LARGEST_FILE_BYTES} bytes; a config may have no more"
        )
    try:
        return parse(path, content.decode("utf-8"), expected)
    except UnicodeDecodeError as error:
        raise DoctorError(
            f"{path}: not text: byte {error.start} is not UTF-8"
        ) from None


def parse(path: Path, text: str, expected: str = "mapping") -> YamlText:
    """The same for a text; path: the name to use for it."""
    try:
        _check_depth(path, text)
        root = yaml.compose(text, Loader=_loader())
        if root is None or root.id != expected:
            what = f"the top level is a {root.id}" if root else "empty"
            raise DoctorError(f"{path}: {what}; expected a {expected}")
        reader = _Reader(path)
        tree = reader.value((), root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise DoctorError(f"{path}{place}: not YAML: {reason}") from None
    return YamlText(path, text, tree, nodes=reader.nodes, key_nodes=reader.key_nodes)


@cache
def _loader() -> type[Any]:
    """PyYAML's, with OmegaConf's own rules on what is a number; OmegaConf's loader is ten times as
    slow.

    OmegaConf 2.3 has no public name for them.
    """
    rules = _utils.get_yaml_loader().yaml_implicit_resolvers
    return type("_Loader", (LOADER,), {"yaml_implicit_resolvers": rules})


def _check_depth(path: Path, text: str) -> None:
    """Before anything recursive sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_LEVELS:
            raise _too_deep(path, event)


def _too_deep(path: Path, node: yaml.Node | yaml.Event) -> DoctorError:
    return DoctorError(f"{path}:{_line(node)}: nested deeper than {MOST_LEVELS}")


def _line(node: yaml.Node | yaml.Event) -> int:
    return int(node.start_mark.line) + 1


@dataclass
class _Reader:
    """Makes values of a file's nodes, aliases and merges expanded, and keeps each node's path."""

    path: Path
    nodes: dict[Keys, yaml.Node] = field(default_factory=dict)
    key_nodes: dict[Keys, yaml.Node] = field(default_factory=dict)
    _scalars: Any = field(default_factory=lambda: yaml.SafeLoader(""))
    _room: int = MOST_VALUES

    def value(self, keys: Keys, node: yaml.Node) -> Any:
        self._take()
        if len(keys) > MOST_LEVELS:  # an alias to what holds it
            raise _too_deep(self.path, node)
        if node.tag not in _PLAIN_TAGS:
            raise self._refused(
                node, f"the tag {node.tag!r} is not allowed; allowed: plain values"
            )
        self.nodes[keys] = node
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value((*keys, str(index)), child)
                for index, child in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            tree = {}
            for name, (key, child) in self._entries(node, keys).items():
                path = (*keys, name)
                tree[name] = self.value(path, child)
                self.key_nodes[path] = key
            return tree
        try:
            value = self._scalars.construct_object(node)
        except ValueError as error:
            raise self._refused(node, str(error)) from None
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise self._refused(node, f"a number of {len(node.value)} digits")
        return value

    def _entries(
        self, mapping: yaml.MappingNode, keys: Keys, merges: int = 0
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """By the key: its node, and its value's; the mapping's own count before merged ones."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, child in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refused(key, f"a key that is a {key.id}; expected a name")
            if key.tag != _MERGE:
                if key.value in own:
                    name = ".".join((*keys, key.value))
                    first = _line(own[key.value][0])
                    raise self._refused(
                        key, f"{name} is there twice, first in line {first}"
                    )
                own[key.value] = (key, child)
                continue
            several = isinstance(child, yaml.SequenceNode)
            for source in child.value if several else [child]:
                self._take()
                if not isinstance(source, yaml.MappingNode) or merges > MOST_LEVELS:
                    raise self._refused(
                        key, f"<< merges a {source.id} here; expected a mapping"
                    )
                merged = self._entries(source, keys, merges + 1) | merged
        return merged | own

    def _take(self) -> None:
        self._room -= 1
        if self._room < 0:
            raise DoctorError(
                f"{self.path}: more than {MOST_VALUES} values, when its aliases are"
                " followed"
            )

    def _refused(self, node: yaml.Node, why: str) -> DoctorError:
        return DoctorError(f"{self.path}:{_line(node)}: {why}")
