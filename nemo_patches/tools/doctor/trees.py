"""Trees of mappings and lists, as YAML has them: their entries, and a value by its path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

# The path of a value: names of mappings' keys, and indices of lists.
Keys = tuple[str, ...]


class Unknown:
    def __repr__(self) -> str:
        return "not known before the job runs"


UNKNOWN = Unknown()


def entries(node: Any) -> list[tuple[str, Any]]:
    """The keys of a mapping, or the indices of a list, and their values; none of anything else."""
    if isinstance(node, dict):
        return list(node.items())
    return (
        [(str(index), child) for index, child in enumerate(node)]
        if isinstance(node, list)
        else []
    )


def walk(node: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every node with its path, outer before inner."""
    yield keys, node
    for key, child in entries(node):
        yield from walk(child, (*keys, key))


def place(tree: Any, keys: Keys) -> tuple[Any, Any]:
    """What holds the value at a path, and the key or the index that the value has there."""
    for key in keys[:-1]:
        tree = tree[_index(tree, key)]
    return tree, _index(tree, keys[-1])


def put(tree: Any, keys: Keys, value: Any) -> None:
    holder, key = place(tree, keys)
    holder[key] = value


def with_names(node: Any) -> Any:
    """A copy with every key as text, as paths have them, and with nothing in it twice."""
    if isinstance(node, dict):
        return {str(key): with_names(value) for key, value in node.items()}
    return [with_names(value) for value in node] if isinstance(node, list) else node


def _index(node: Any, key: str) -> Any:
    return int(key) if isinstance(node, Sequence) else key
