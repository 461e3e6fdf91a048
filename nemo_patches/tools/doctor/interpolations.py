"""Resolve the interpolations of a YAML file's values as OmegaConf does, without a resolver's call,
and with bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf, _utils
from omegaconf.errors import OmegaConfBaseException

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.trees import Keys, entries, place, walk, with_names
from nemo_patches.tools.doctor.yaml_text import MOST_VALUES, YamlText

LONGEST_TEXT = 10_000  # characters that interpolations may make

_MISSING = "???"  # OmegaConf's word for a value that is still to be given
_MOST_INTERPOLATIONS = 1_000  # NeMo's own configs have at most 200
# Interpolations in each other: OmegaConf's parser recurses, as deep as the text says
_MOST_NESTED = 10
_LONGEST_CHAIN = 50  # interpolations that lead to each other
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class Unknown:
    def __repr__(self) -> str:
        return "not known before the job runs"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Resolved:
    """broken: the interpolations that lead nowhere, and why. of_machine: the values that a resolver
    would give.
    """

    broken: dict[Keys, str] = field(default_factory=dict)
    of_machine: set[Keys] = field(default_factory=set)


@cache
def _loader() -> type[Any]:
    """PyYAML's, with OmegaConf's own rules on what is a number; OmegaConf's loader is ten times as
    slow.

    OmegaConf has no public name for them. Raises AttributeError for one that has them elsewhere.
    """
    rules = getattr(_utils, "get_yaml_loader")().yaml_implicit_resolvers  # noqa: B009
    return type("_Loader", (yaml_text.LOADER,), {"yaml_implicit_resolvers": rules})


def plain(source: YamlText) -> Any:
    """The values of a file, with every key as text; interpolations stay as they are written. Raises
    DoctorError.
    """
    _check_interpolations(source)
    try:
        loader = _loader()
    except AttributeError:
        raise DoctorError(
            f"{source.path}: omegaconf {omegaconf.__version__} has its rules on numbers"
            " elsewhere; allowed: 2.3"
        ) from None
    try:
        return with_names(yaml.load(source.text, Loader=loader))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise DoctorError(f"{source.path}: {first_line(error)}") from None


def resolve(source: YamlText, tree: Any) -> Resolved:
    """Replace every interpolation in a tree of this file's values, in place, and put UNKNOWN where
    it cannot be told.

    Those that name a key are followed. A resolver is never called. Raises DoctorError.
    """
    texts = [
        (keys, node)
        for keys, node in walk(tree)
        if node == _MISSING or _has_interpolation(node)
    ]
    for keys, text in texts:
        _check_grammar(source, keys, text)
    following = _Following(source, tree)
    for keys, _ in texts:
        following.value(keys)
    broken = following.resolved.broken
    return Resolved(
        {keys: broken[keys] for keys, _ in texts if keys in broken},
        following.resolved.of_machine,
    )


def _has_interpolation(node: Any) -> bool:
    return isinstance(node, str) and "${" in node


def _check_interpolations(source: YamlText) -> None:
    """Bound the number and depth of interpolations before OmegaConf's parser sees them."""
    count = 0
    for keys, node in source.nodes.items():
        if not isinstance(node, yaml.ScalarNode) or "${" not in node.value:
            continue
        count += node.value.count("${")
        if count > _MOST_INTERPOLATIONS:
            raise DoctorError(
                f"{source.path}: more than {_MOST_INTERPOLATIONS} interpolations"
            )
        if depth_of(node.value) > _MOST_NESTED:
            place = f"{source.path}:{source.line(keys)}: {'.'.join(keys)}"
            raise DoctorError(
                f"{place}: more than {_MOST_NESTED} interpolations in each other"
            )


def _check_grammar(source: YamlText, keys: Keys, text: str) -> None:
    try:
        OmegaConf.create([text])
    except (OmegaConfBaseException, RecursionError) as error:
        where = f"{source.path}:{source.line(keys)}: {'.'.join(keys)}"
        raise DoctorError(f"{where} is no interpolation: {first_line(error)}") from None


def depth_of(text: str) -> int:
    """How deep interpolations, and the braces of their arguments, are in each other."""
    depth = 0
    deepest = 0
    for part in re.findall(r"\$\{|[{}\[\]]", text):
        depth = max(depth - 1, 0) if part in "}]" else depth + 1
        deepest = max(deepest, depth)
    return deepest


def _calls_a_resolver(text: str) -> bool:
    """Whether there is a colon inside the braces of an interpolation: ${name:arguments}, also
    ${${name}:arguments}.
    """
    depth = 0
    for part in re.findall(r"\$\{|[{}:]", text):
        if part == "${" or (part == "{" and depth):
            depth += 1
        elif part == "}" and depth:
            depth -= 1
        elif part == ":" and depth:
            return True
    return False


class _LeadsNowhere(Exception):
    """The text says why."""


class _Circle(Exception):
    def __str__(self) -> str:
        return "leads back to itself, or through too many others"


class _Following:
    """A tree whose interpolations are followed, each when its value is first asked for."""

    def __init__(self, source: YamlText, tree: Any) -> None:
        self.resolved = Resolved()
        self._source = source
        self._tree = tree
        self._open: list[
            Keys
        ] = []  # those that are being followed, each from the one before it
        self._room = MOST_VALUES

    def value(self, keys: Keys) -> Any:
        """The value at a path; what is below it may still have interpolations. Raises _Circle
        within another one.
        """
        if keys in self._open:
            raise _Circle
        if not keys:
            return self._tree
        holder, key = place(self._tree, keys)
        text = holder[key]
        if text == _MISSING:
            holder[key] = UNKNOWN
        elif _has_interpolation(text):
            holder[key] = UNKNOWN  # also where the next line raises
            holder[key] = self._followed(keys, text)
        return holder[key]

    def _whole(self, keys: Keys) -> Any:
        value = self.value(keys)
        for key, _ in entries(value):
            self._whole((*keys, key))
        return value

    def _followed(self, keys: Keys, text: str) -> Any:
        self._open.append(keys)
        try:
            if len(self._open) > _LONGEST_CHAIN:
                raise _Circle
            return self._evaluated(keys, text)
        except _LeadsNowhere as why:
            self.resolved.broken[keys] = str(why)
        except _Circle as why:
            self.resolved.broken[keys] = str(why)
            if len(self._open) > 1:  # whatever leads into it is broken, too
                raise
        finally:
            self._open.pop()
        return UNKNOWN

    def _evaluated(self, keys: Keys, text: str) -> Any:
        if _calls_a_resolver(text):
            self.resolved.of_machine.add(keys)
            return UNKNOWN
        if "\\" in text:  # an escaped interpolation
            return UNKNOWN
        while found := _INNERMOST.search(text):
            value = self._target(keys, found[1].strip())
            if value is UNKNOWN:
                return UNKNOWN
            if found[0] == text:
                return self._copy(value)
            if isinstance(value, (dict, list)):
                return UNKNOWN
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
            if len(text) > LONGEST_TEXT or "$" in str(value):
                return UNKNOWN
        if _has_interpolation(text):
            raise _LeadsNowhere(f"{text} is no key")
        return text

    def _target(self, keys: Keys, path: str) -> Any:
        """What a path leads to: from the section of the interpolation at these keys with a dot,
        else from the top.
        """
        names = path.lstrip(".")
        dots = len(path) - len(names)
        if dots > len(keys):
            raise _LeadsNowhere(f"Interpolation key {path!r} is above the top")
        target = keys[:-dots] if dots else ()
        for name in filter(None, names.replace("[", ".").replace("]", "").split(".")):
            target = (*target, self._key(target, name, path))
            if self.value(target) is UNKNOWN:
                break
        value = self._whole(target) if target else self._tree
        if self.resolved.broken.get(target) == str(_Circle()):
            raise _Circle
        if value is UNKNOWN and target in self.resolved.of_machine:
            self.resolved.of_machine.add(keys)
        return value

    def _key(self, holder: Keys, name: str, path: str) -> str:
        """The key of that name in a mapping, or its index in a list as paths have it."""
        node = self.value(holder)
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            return str(int(name))
        if not isinstance(node, dict) or name not in node:
            raise _LeadsNowhere(f"Interpolation key {path!r} not found")
        return name

    def _copy(self, value: Any) -> Any:
        self._room -= sum(1 for _ in walk(value))
        if self._room < 0:
            what = (
                f"more than {MOST_VALUES} values, when its interpolations are followed"
            )
            raise DoctorError(f"{self._source.path}: {what}")
        return with_names(value)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
