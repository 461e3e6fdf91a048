"""A YAML file, read with bounds on size, depth and aliases; nothing in it is executed."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.trees import Keys

# libyaml where PyYAML was built with it, ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LARGEST_FILE_BYTES = (
    1 << 20
)  # NeMo's own configs have at most 40 KiB, one with a large vocabulary some 100 KiB
MOST_VALUES = (
    50_000  # every alias counts as often as it is used; NeMo's own have up to 21,000
)
MOST_LEVELS = 50  # of mappings and sequences in each other
# Of a number, which no setting needs, and Python refuses to print those with thousands
MOST_DIGITS = 1_000

_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in (
        "null",
        "bool",
        "int",
        "float",
        "str",
        "seq",
        "map",
        "timestamp",
        "merge",
        "value",
    )
)

_ARE = {
    "mapping": "a NeMo config is",
    "sequence": "NeMo reads the inputs of an input_cfg",
}


class WrongKindError(DoctorError):
    """It is YAML, and not the mapping or sequence that NeMo reads there."""


@dataclass(frozen=True)
class YamlText:
    """The text of one file, and the node of every key in it (`key_nodes`) and of every value
    (`nodes`).
    """

    path: Path
    text: str
    nodes: dict[Keys, yaml.Node]
    key_nodes: dict[Keys, yaml.Node]

    def line(self, keys: Keys) -> int | None:
        """The line, from 1, of that key, or of the nearest one that holds it; None where there is
        none.
        """
        while keys:
            node = self.key_nodes.get(keys) or self.nodes.get(keys)
            if node is not None:
                return int(node.start_mark.line) + 1
            keys = keys[:-1]
        return None


def read(path: Path, expected: str = "mapping") -> YamlText:
    """Read one file. Raises DoctorError for whatever is not a YAML mapping (or sequence, if that is
    expected) of plain values within the bounds."""
    return decoded(path, _content(path), expected)


def parse(path: Path, text: str, expected: str = "mapping") -> YamlText:
    """The same for a text; path: the name to use for it."""
    try:
        _check_events(path, text)
        root = yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError as error:
        raise DoctorError(
            f"{path}{_place(error)}: not YAML: {_reason(error)}"
        ) from None
    if root is None:
        raise WrongKindError(
            f"{path}: empty; expected a {expected}, as {_ARE[expected]}"
        )
    if root.id != expected:
        raise WrongKindError(
            f"{path}: the top level is a {root.id}; expected a {expected}, as"
            f" {_ARE[expected]}"
        )
    nodes: dict[Keys, yaml.Node] = {}
    key_nodes: dict[Keys, yaml.Node] = {}
    for keys, key_node, node in _walk(path, root):
        nodes[keys] = node
        if key_node is not None:
            key_nodes[keys] = key_node
    return YamlText(path=path, text=text, nodes=nodes, key_nodes=key_nodes)


def _content(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise DoctorError(f"{path}: a directory; expected a YAML file")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise DoctorError(f"{path}: not a regular file; expected a YAML file")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte
        raise DoctorError(f"{path}: {getattr(error, 'strerror', error)}") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise DoctorError(
            f"{path}: {status.st_size} bytes; a config may have {LARGEST_FILE_BYTES}"
        )
    return content


def decoded(path: Path, content: bytes, expected: str = "mapping") -> YamlText:
    """The same for a file's bytes."""
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


def _check_events(path: Path, text: str) -> None:
    """Bound depth and size before anything recursive sees the text."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=LOADER)):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        if depth > MOST_LEVELS:
            raise DoctorError(
                f"{path}:{event.start_mark.line + 1}: nested deeper than {MOST_LEVELS}"
            )
        if isinstance(event, yaml.DocumentStartEvent) and count > 1:
            raise DoctorError(
                f"{path}:{event.start_mark.line + 1}: a second document; a config"
                " is one"
            )
        if count > 2 * MOST_VALUES:
            raise DoctorError(
                f"{path}:{event.start_mark.line + 1}: more than {MOST_VALUES} values"
            )


def _walk(
    path: Path, root: yaml.Node
) -> Iterator[tuple[Keys, yaml.Node | None, yaml.Node]]:
    """Every value with its path and the node of its key, aliases expanded; checks what only the
    whole tree shows.
    """
    waiting: list[tuple[Keys, yaml.Node | None, yaml.Node]] = [((), None, root)]
    count = 0
    while waiting:
        keys, key_node, node = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise DoctorError(
                f"{path}: more than {MOST_VALUES} values, when its aliases are followed"
            )
        if len(keys) > MOST_LEVELS:  # an alias to what holds it
            raise DoctorError(
                f"{path}:{node.start_mark.line + 1}: nested deeper than {MOST_LEVELS}"
            )
        if node.tag not in _PLAIN_TAGS:
            raise DoctorError(
                f"{path}:{node.start_mark.line + 1}: the tag {node.tag!r} is not"
                " allowed; allowed: plain values"
            )
        yield keys, key_node, node
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise DoctorError(
                f"{path}:{node.start_mark.line + 1}: a number of {len(node.value)}"
                " digits"
            )
        if isinstance(node, yaml.MappingNode):
            named: set[Keys] = set()
            for merged, child in enumerate(_children(path, keys, node)):
                if child[0] not in named:  # the mapping's own come first, and count
                    named.add(child[0])
                    waiting.append(child)
                if (
                    len(waiting) > MOST_VALUES or merged > MOST_VALUES
                ):  # merged again and again
                    raise DoctorError(
                        f"{path}: more than {MOST_VALUES} values, when its aliases are"
                        " followed"
                    )
        elif isinstance(node, yaml.SequenceNode):
            waiting += [
                ((*keys, str(index)), None, child)
                for index, child in enumerate(node.value)
            ]


def _children(
    path: Path, keys: Keys, mapping: yaml.MappingNode, merges: int = 0
) -> Iterator[tuple[Keys, yaml.Node | None, yaml.Node]]:
    if merges > MOST_LEVELS:
        raise DoctorError(
            f"{path}:{mapping.start_mark.line + 1}: merged deeper than {MOST_LEVELS}"
        )
    lines: dict[str, int] = {}
    merged: list[tuple[int, yaml.Node]] = []
    for key, child in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise DoctorError(
                f"{path}:{line}: a key that is a {key.id}; expected a name"
            )
        if key.tag == "tag:yaml.org,2002:merge":
            sources = child.value if isinstance(child, yaml.SequenceNode) else [child]
            merged += [(line, source) for source in sources]
            continue
        if key.value in lines:
            raise DoctorError(
                f"{path}:{line}: {'.'.join((*keys, key.value))} is there twice, first"
                f" in line {lines[key.value]}"
            )
        lines[key.value] = line
        yield (*keys, key.value), key, child
    for line, source in merged:
        if not isinstance(source, yaml.MappingNode):
            raise DoctorError(
                f"{path}:{line}: << merges a {source.id}; expected a mapping"
            )
        yield from _children(path, keys, source, merges=merges + 1)


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def _reason(error: yaml.YAMLError) -> str:
    return str(
        getattr(error, "problem", None) or getattr(error, "reason", None) or error
    )
