"""Resolve the interpolations of a YAML file's values as OmegaConf does, without a resolver's call, and with bounds."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf, _utils
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.trees import Keys, entries, place, put, walk, with_names
from nemo_patches.tools.doctor.yaml_text import MOST_VALUES, ConfigError, YamlText

MISSING = "???"  # OmegaConf's word for a value that is still to be given
LONGEST_TEXT = 10_000  # characters that interpolations may make

_MOST_INTERPOLATIONS = 1_000  # NeMo's own configs have at most 200
_MOST_NESTED = 10  # interpolations in each other: OmegaConf's parser recurses, as deep as the text says
_ROUNDS = 10  # so often an interpolation may lead to another one further down
_MOST_PATTERNS = 50  # of keys that interpolations may name; with more OmegaConf is given the whole config
_INDEX_DIGITS = 6
_NAME = re.compile(r"""[^\\{}()[\]:.\s'"]+""")  # of a key, in an interpolation
_PATH_END = re.compile(_NAME.pattern + r"(?=\]?\s*\})")


class Unknown:
    def __repr__(self) -> str:
        return "not known before the job runs"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Resolved:
    """broken: the interpolations that lead nowhere, and why. of_machine: the values that a resolver would give."""

    broken: dict[Keys, str]
    of_machine: set[Keys]


@cache
def _loader() -> type[Any]:
    """PyYAML's, with OmegaConf's own rules on what is a number; OmegaConf's loader is ten times as slow.

    OmegaConf has no public name for them. Raises AttributeError for one that has them elsewhere.
    """
    rules = getattr(_utils, "get_yaml_loader")().yaml_implicit_resolvers  # noqa: B009
    return type("_Loader", (yaml_text.LOADER,), {"yaml_implicit_resolvers": rules})


def plain(source: YamlText) -> Any:
    """The values of a file, with every key as text; interpolations stay as they are written. Raises ConfigError."""
    _check_interpolations(source)
    try:
        loader = _loader()
    except AttributeError:
        raise ConfigError(
            f"{source.path}: omegaconf {omegaconf.__version__} has its rules on numbers elsewhere; allowed: 2.3"
        ) from None
    try:
        return with_names(yaml.load(source.text, Loader=loader))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{source.path}: {first_line(error)}") from None


def resolve(source: YamlText, tree: Any) -> Resolved:
    """Replace every interpolation in a tree of this file's values, in place, and put UNKNOWN where it cannot be told.

    Those that name a key are followed. A resolver is never called. Raises ConfigError.
    """
    of_machine: set[Keys] = set()
    try:
        texts = [text for text in _texts(tree) if "${" in text]
        broken = _resolve(source.path, tree, OmegaConf.create(_needed(tree, texts)), of_machine) if texts else {}
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{source.path}{_place_of_grammar(source)}: {first_line(error)}") from None
    for keys, node in list(walk(tree)):
        if node == MISSING:
            put(tree, keys, UNKNOWN)
    return Resolved(broken, of_machine)


def _needed(tree: Any, texts: Sequence[str]) -> Any:
    """The part of a tree that these interpolations may lead to: OmegaConf takes some 70 us for each value.

    It is every key or index that one of them names, and all below it where a path may end there. Where a path is made
    of another interpolation's value, every text found so far may be a part of it; * stands for what is not known yet.
    """
    names, ends = _names(texts), _names(end for text in texts for end in _PATH_END.findall(text))
    while True:
        patterns = [fnmatch.translate(end) for end in ends if "*" in end]
        if len(patterns) > _MOST_PATTERNS:
            return tree
        part = _part(tree, names, ends, re.compile("|".join(patterns) or "(?!)")) or {}
        if all(depth_of(text) <= 1 for text in texts):
            return part
        made = _names(map(_pattern, _texts(part))) - {"*"}  # what one interpolation gives alone is another text's value
        if made <= ends:
            return part
        ends |= made


def _names(texts: Iterable[str]) -> set[str]:
    """The key names in these texts; an index also as Python writes it."""
    names = {name for text in texts for name in _NAME.findall(text.replace("${", "{"))}
    return names | {str(int(name)) for name in names if len(name) < _INDEX_DIGITS and name.isdecimal()}


def _pattern(text: str) -> str:
    """The text with * in place of its interpolations."""
    for _ in range(_MOST_NESTED):
        text = re.sub(r"\$\{[^{}]*\}", "*", text)
    return text


def _texts(tree: Any) -> Iterator[str]:
    return (node for _, node in walk(tree) if isinstance(node, str))


def _part(node: Any, names: set[str], ends: set[str], pattern: re.Pattern[str]) -> Any:
    """The needed part of a node (see _needed); None if nothing of it is needed."""
    kept: dict[str, Any] = {}
    for key, child in entries(node):
        if key in ends or pattern.match(key):
            kept[key] = child
        elif isinstance(child, (dict, list)):
            if (part := _part(child, names, ends, pattern)) is not None:
                kept[key] = part
        elif key in names or (isinstance(child, str) and "${" in child):
            kept[key] = child
    if isinstance(node, dict) or not kept:
        return kept or None
    return [kept.get(str(index)) for index in range(int(next(reversed(kept))) + 1)]


def _check_interpolations(source: YamlText) -> None:
    """Bound the number and depth of interpolations before OmegaConf's parser sees them."""
    count = 0
    for keys, node in source.nodes.items():
        if not isinstance(node, yaml.ScalarNode) or "${" not in node.value:
            continue
        count += node.value.count("${")
        if count > _MOST_INTERPOLATIONS:
            raise ConfigError(f"{source.path}: more than {_MOST_INTERPOLATIONS} interpolations")
        if depth_of(node.value) > _MOST_NESTED:
            place = f"{source.path}:{source.line(keys)}: {'.'.join(keys)}"
            raise ConfigError(f"{place}: more than {_MOST_NESTED} interpolations in each other")


def depth_of(text: str) -> int:
    """How deep interpolations, and the braces of their arguments, are in each other."""
    depth = deepest = 0
    for part in re.findall(r"\$\{|[{}\[\]]", text):
        depth = max(depth - 1, 0) if part in "}]" else depth + 1
        deepest = max(deepest, depth)
    return deepest


def _place_of_grammar(source: YamlText) -> str:
    """Line and key of the interpolation that OmegaConf cannot parse; its error has neither."""
    for keys, node in source.nodes.items():
        if isinstance(node, yaml.ScalarNode) and "${" in node.value:
            try:
                OmegaConf.create([node.value])
            except OmegaConfBaseException:
                return f":{source.line(keys)}: {'.'.join(keys)} is no interpolation"
    return ""


def _resolve(path: Path, tree: Any, config: Any, of_machine: set[Keys]) -> dict[Keys, str]:
    """Replace every interpolation and every ??? in place; return those that lead nowhere, with why.

    OmegaConf resolves each at its place in the tree while all others that are not resolved yet are ??? there. So no
    text is expanded more than once, and neither a chain of them nor a circle runs away.
    """
    waiting: dict[Keys, str] = {}
    for keys, text in [(keys, node) for keys, node in walk(tree) if isinstance(node, str) and "${" in node]:
        put(tree, keys, MISSING)
        put(config, keys, MISSING)
        if _calls_a_resolver(text):
            of_machine.add(keys)
        else:
            waiting[keys] = text
    if len(waiting) > _MOST_INTERPOLATIONS:
        raise ConfigError(f"{path}: {len(waiting)} interpolations; a config may have {_MOST_INTERPOLATIONS}")
    broken: dict[Keys, str] = {}
    room = MOST_VALUES
    for part_of_it_may_be_unknown in (False, True):
        for _ in range(_ROUNDS):
            before = len(waiting)
            for keys, text in list(waiting.items()):
                try:
                    value = _evaluated(config, keys, text)
                except OmegaConfBaseException as error:
                    if isinstance(error, (MissingMandatoryValue, InterpolationToMissingValueError)):
                        continue
                    broken[keys] = first_line(error)
                    del waiting[keys]
                    continue
                parts = [node for _, node in walk(value)]
                if MISSING in parts and not part_of_it_may_be_unknown:
                    continue
                room -= len(parts)
                if room < 0:
                    raise ConfigError(f"{path}: more than {MOST_VALUES} values, when its interpolations are followed")
                put(tree, keys, value)
                put(config, keys, value)
                del waiting[keys]
            if len(waiting) == before:
                break
    broken.update(dict.fromkeys(_circles(config, waiting), "leads back to itself, or through too many others"))
    ends = {keys[-1] for keys in of_machine}
    of_machine |= {keys for keys, text in waiting.items() if keys not in broken and ends & _names([text])}
    return broken


def _calls_a_resolver(text: str) -> bool:
    """Whether there is a colon inside the braces of an interpolation: ${name:arguments}, also ${${name}:arguments}."""
    depth = 0
    for part in re.findall(r"\$\{|[{}:]", text):
        if part == "${" or (part == "{" and depth):
            depth += 1
        elif part == "}" and depth:
            depth -= 1
        elif part == ":" and depth:
            return True
    return False


def _evaluated(config: Any, keys: Keys, text: str) -> Any:
    """What an interpolation gives at its place, which is ??? again afterwards; MISSING for what is no plain value."""
    holder, last = place(config, keys)
    try:
        holder[last] = text
        value = holder[last]
    finally:
        holder[last] = MISSING
    if isinstance(value, (DictConfig, ListConfig)):
        return with_names(OmegaConf.to_container(value, resolve=False))
    if isinstance(value, str) and ("${" in value or len(value) > LONGEST_TEXT):
        return MISSING  # it was escaped, and others would take it for an interpolation; or it is a bomb
    return value


def _circles(config: Any, waiting: Mapping[Keys, str]) -> list[Keys]:
    """Of the interpolations left over, those that stay so if every ??? is given: they lead in a circle."""
    left = dict(waiting)
    if not left:
        return []  # OmegaConf takes a second for a copy of a large tree
    tree = OmegaConf.to_container(config, resolve=False)
    for keys, node in list(walk(tree)):
        if node == MISSING and keys not in left:
            put(tree, keys, 0)
    given = OmegaConf.create(tree)
    for _ in range(_ROUNDS):
        for keys, text in list(left.items()):
            try:
                _evaluated(given, keys, text)
            except (MissingMandatoryValue, InterpolationToMissingValueError):
                continue
            except OmegaConfBaseException:
                pass  # it names a part of what is not given
            put(given, keys, 0)
            del left[keys]
    return list(left)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
