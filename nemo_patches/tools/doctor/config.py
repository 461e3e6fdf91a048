"""One NeMo training config: its values as OmegaConf gives them, with Hydra's overrides, and where each comes from."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omegaconf
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf, _utils
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.yaml_text import MOST_LEVELS, MOST_VALUES, ConfigError, Keys, YamlText

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MISSING = "???"  # OmegaConf's word for a value that is still to be given

_MOST_INTERPOLATIONS = 1_000  # NeMo's own configs have at most 200
_MOST_NESTED = 10  # interpolations in each other: OmegaConf's parser recurses, as deep as the text says
_ROUNDS = 10  # so often an interpolation may lead to another one further down
_LONGEST_TEXT = 10_000  # characters that interpolations may make
_LONGEST_SHOWN = 100  # characters of a value in a finding
_LARGEST_NUMBER = 1e15
_MOST_PATTERNS = 50  # of keys that interpolations may name; with more OmegaConf is given the whole config
_INDEX_DIGITS = 6
_NAME = re.compile(r"""[^\\{}()[\]:.\s'"]+""")  # of a key, in an interpolation
_PATH_END = re.compile(_NAME.pattern + r"(?=\]?\s*\})")
_SECTIONS = ("model", "data", "trainer", "exp_manager")  # that NeMo's training scripts read


class Unknown:
    """A value that only the job will know."""

    def __repr__(self) -> str:
        return "not known before the job runs"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Value:
    """One value that a rule read: `origin` is "line 12", "override", or "default" where the config does not have it.

    line: where the value is, or else the section that it belongs in; None where the file has neither.
    """

    key: str
    value: Any
    origin: str
    line: int | None = field(default=None, compare=False)

    @property
    def known(self) -> bool:
        """False for ???, for what a resolver gives, and for an interpolation that leads nowhere."""
        return self.value is not UNKNOWN

    @property
    def given(self) -> bool:
        """Whether the config has it, be it as null."""
        return self.origin != "default"

    @property
    def number(self) -> float | None:
        """As a finite number; None if it is none, and a boolean is none."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            return None
        return float(self.value) if abs(self.value) < _LARGEST_NUMBER else None  # not so for NaN

    def __str__(self) -> str:
        text = "null" if self.value is None else str(self.value)
        text = text.lower() if isinstance(self.value, bool) else text
        where = "NOT SET, the default" if self.origin == "default" else self.origin
        return f"{self.key}: {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'} ({where})"


@dataclass(frozen=True)
class Config:
    """A config as the job would get it: `tree` of plain values, UNKNOWN where it cannot be told.

    broken: the paths of interpolations that lead nowhere, with OmegaConf's reason.
    """

    source: YamlText
    tree: Mapping[str, Any]
    overridden: frozenset[Keys]
    broken: Mapping[Keys, str]

    def get(self, keys: Keys, default: Any = None) -> Value:
        """The value at a path; `default`, what NeMo or Lightning takes instead, where the config does not have it."""
        node: Any = self.tree
        for key in keys:
            if node is UNKNOWN:
                break
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return Value(".".join(keys), default, "default", self.source.line(keys))
        return Value(".".join(keys), node, self.origin(keys), self.source.line(keys))

    def origin(self, keys: Keys) -> str:
        """Where the value at a path comes from."""
        if any(keys[: len(given)] == given or given[: len(keys)] == keys for given in self.overridden):
            return "override"
        line = self.source.line(keys)
        return f"line {line}" if line else "default"

    def mappings(self) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
        """Every mapping in it with its path, outer before inner.

        Beside a model, other sections than NeMo's own hold what the config is written with: templates for anchors.
        """
        top = {key: value for key, value in self.tree.items() if key in _SECTIONS or "model" not in self.tree}
        waiting: list[tuple[Keys, Any]] = [((), top)]
        while waiting:
            keys, node = waiting.pop(0)
            if isinstance(node, dict):
                yield keys, node
                children: Iterable[tuple[str, Any]] = node.items()
            else:
                children = ((str(index), child) for index, child in enumerate(node))
            waiting += [((*keys, key), child) for key, child in children if isinstance(child, (dict, list))]


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config. Raises ConfigError for a file that cannot be read, or an override that does not fit it.

    Of interpolations, those that name a key are followed. A resolver (${oc.env:HOME}, ${now:%Y}, a training script's
    own) is never called: what it would give belongs to the job's environment, and may be a secret. It is UNKNOWN.
    """
    return with_overrides(yaml_text.read(path), overrides)


def with_overrides(source: YamlText, overrides: Sequence[str] = ()) -> Config:
    """The same for a text that was read already."""
    _check_interpolations(source)
    tree = _plain(source)
    _check_defaults(source, tree)
    overridden = _overridden(source.path, tree, overrides)
    try:
        texts = _interpolations(tree)
        broken = _resolve(source.path, tree, OmegaConf.create(_needed(tree, texts))) if texts else {}
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{source.path}{_place_of_grammar(source)}: {_first_line(error)}") from None
    _mark_unknown(tree)
    return Config(source, tree, overridden, broken)


def _check_defaults(source: YamlText, tree: Mapping[str, Any]) -> None:
    """Refuse what Hydra composes of several files: a verdict on one of them would be none on the job."""
    entries = tree.get("defaults")
    if isinstance(entries, list) and not all(_changes_no_value(entry) for entry in entries):
        raise ConfigError(
            f"{source.path}:{source.line(('defaults',))}: composed by Hydra of other files, which are not read; "
            "examine the composed config: python train.py ... --cfg job > composed.yaml"
        )


def _changes_no_value(entry: Any) -> bool:
    """Whether an entry of the defaults is this file itself, or is on Hydra's own part: a launcher, how it logs."""
    names = list(entry) if isinstance(entry, dict) else [entry]
    return all(name == "_self_" or str(name).rpartition(" ")[2].startswith("hydra/") for name in names)


@cache
def _loader() -> type[Any]:
    """PyYAML's, with OmegaConf's own rules on what is a number; OmegaConf's loader is ten times as slow.

    OmegaConf has no public name for them. Raises AttributeError for one that has them elsewhere.
    """
    rules = getattr(_utils, "get_yaml_loader")().yaml_implicit_resolvers  # noqa: B009
    return type("_Loader", (yaml_text.LOADER,), {"yaml_implicit_resolvers": rules})


def _plain(source: YamlText) -> dict[str, Any]:
    try:
        loader = _loader()
    except AttributeError:
        raise ConfigError(
            f"{source.path}: omegaconf {omegaconf.__version__} has its rules on numbers elsewhere; allowed: 2.3"
        ) from None
    try:
        plain = _with_names(yaml.load(source.text, Loader=loader))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{source.path}: {_first_line(error)}") from None
    assert isinstance(plain, dict)
    return plain


def _interpolations(node: Any) -> list[str]:
    """Every text with an interpolation in it."""
    return [text for text in _texts(node) if "${" in text]


def _needed(tree: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
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
        if all(_depth(text) <= 1 for text in texts):
            return part
        made = _names(map(_pattern, _texts(part))) - {"*"}  # what one interpolation gives alone is another text's value
        if made <= ends:
            return part
        ends |= made


def _names(texts: Iterable[str]) -> set[str]:
    """The names of keys in them, and of indices also as Python writes them."""
    names = {name for text in texts for name in _NAME.findall(text.replace("${", "{"))}
    return names | {str(int(name)) for name in names if len(name) < _INDEX_DIGITS and name.isdecimal()}


def _pattern(text: str) -> str:
    """A text with * for its interpolations."""
    for _ in range(_MOST_NESTED):
        text = re.sub(r"\$\{[^{}]*\}", "*", text)
    return text


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts(child)


def _part(node: Any, names: set[str], ends: set[str], pattern: re.Pattern[str]) -> Any:
    """See _needed; None for a mapping or sequence of which nothing is needed."""
    entries = node.items() if isinstance(node, dict) else ((str(index), child) for index, child in enumerate(node))
    kept: dict[str, Any] = {}
    for key, child in entries:
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
    """Bound their number and depth before OmegaConf's parser sees them."""
    count = 0
    for keys, node in source.nodes.items():
        if not isinstance(node, yaml.ScalarNode) or "${" not in node.value:
            continue
        count += node.value.count("${")
        if count > _MOST_INTERPOLATIONS:
            raise ConfigError(f"{source.path}: more than {_MOST_INTERPOLATIONS} interpolations")
        if _depth(node.value) > _MOST_NESTED:
            place = f"{source.path}:{source.line(keys)}: {'.'.join(keys)}"
            raise ConfigError(f"{place}: more than {_MOST_NESTED} interpolations in each other")


def _depth(text: str) -> int:
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


def _with_names(node: Any) -> Any:
    """With every key as text, as paths have them."""
    if isinstance(node, dict):
        return {str(key): _with_names(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_names(value) for value in node]
    return node


# --- overrides


def _overridden(path: Path, tree: dict[str, Any], texts: Sequence[str]) -> frozenset[Keys]:
    """Apply Hydra's overrides in place, in their order, and return the paths that they are for."""
    if not texts:
        return frozenset()
    from hydra.core.override_parser.overrides_parser import OverridesParser  # 0.2 s
    from hydra.errors import HydraException

    parser, given = OverridesParser.create(), []
    for text in texts:
        if len(text) > _LONGEST_TEXT or _depth(text) > MOST_LEVELS:
            raise ConfigError(f"{path}: override {_shown(text)}: too long, or nested too deeply")
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: override {_shown(text)} is not allowed: {_first_line(error)}") from None
        if override.is_hydra_override():
            continue  # how the training script logs, and where it runs
        if override.package is not None or "/" in override.key_or_group:
            raise ConfigError(f"{path}: override {_shown(text)} chooses a file of a group, and those are not read")
        if not all(override.key_or_group.split(".")):
            raise ConfigError(f"{path}: override {_shown(text)} is not allowed: a key without a name")
        if override.is_sweep_override():
            raise ConfigError(f"{path}: override {_shown(text)} is a sweep; the doctor examines one job at a time")
        given.append(_override(path, tree, override))
    return frozenset(given)


def _override(path: Path, tree: dict[str, Any], override: Override) -> Keys:
    """Apply one override in place, and return the path that it is for."""
    text, keys = str(override.input_line), tuple(override.key_or_group.split("."))
    adds = override.is_add() or override.is_force_add()
    holder: Any = tree
    for index, key in enumerate(keys[:-1]):
        if isinstance(holder, list) and key.isdigit() and int(key) < len(holder):
            holder = holder[int(key)]
            continue
        if not isinstance(holder, dict) or (key not in holder and not adds):
            raise _does_not_fit(path, text, keys[: index + 1], holder)
        if not isinstance(holder.get(key), (dict, list)):
            if not adds and key in holder:
                raise _does_not_fit(path, text, keys[: index + 2], holder[key])
            holder[key] = {}
        holder = holder[key]
    last: Any = keys[-1]
    if isinstance(holder, list) and last.isdigit() and int(last) < len(holder) and not override.is_delete():
        last = int(last)
    elif not isinstance(holder, dict) or (last not in holder and not adds):
        raise _does_not_fit(path, text, keys, holder)
    value = _with_names(override.value())
    before = holder[last] if isinstance(last, int) else holder.get(last)
    if override.is_delete():
        if value is not None and value != before:
            raise ConfigError(f"{path}: override {_shown(text)}: {'.'.join(keys)} has another value")
        del holder[last]
    elif override.is_add() and before is not None and not isinstance(value, (dict, list)):
        raise ConfigError(f"{path}: override {_shown(text)}: it is there already; ++ sets it in any case")
    else:
        holder[last] = _merged(path, text, keys, before, value, adds)
    return keys


def _merged(path: Path, text: str, keys: Keys, before: Any, value: Any, adds: bool) -> Any:
    """Hydra merges a mapping into the one that is there, and replaces anything else."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    for key in value:
        if key not in before and not adds:
            raise _does_not_fit(path, text, (*keys, key), before)
    return {
        **before,
        **{key: _merged(path, text, (*keys, key), before.get(key), new, adds) for key, new in value.items()},
    }


def _does_not_fit(path: Path, text: str, keys: Keys, holder: Any) -> ConfigError:
    close = get_close_matches(keys[-1], list(holder), 1) if isinstance(holder, dict) else []
    hint = f"; did you mean {'.'.join((*keys[:-1], close[0]))}?" if close else "; Hydra adds a key with +key=value"
    return ConfigError(f"{path}: override {_shown(text)}: the config has no {'.'.join(keys)}{hint}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


# --- interpolations


def _resolve(path: Path, tree: dict[str, Any], config: DictConfig) -> dict[Keys, str]:
    """Replace every interpolation and every ??? in place; return those that lead nowhere, with why.

    OmegaConf resolves each at its place in the tree while all others that are not resolved yet are ??? there. So no
    text is expanded more than once, and neither a chain of them nor a circle runs away.
    """
    waiting: dict[Keys, str] = {}
    _take_out(tree, config, (), waiting)
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
                    broken[keys] = _first_line(error)
                    del waiting[keys]
                    continue
                if _holds_missing(value) and not part_of_it_may_be_unknown:
                    continue
                room -= _size(value)
                if room < 0:
                    raise ConfigError(f"{path}: more than {MOST_VALUES} values, when its interpolations are followed")
                _put(tree, keys, value)
                _node(config, keys[:-1])[_last(keys, config)] = value
                del waiting[keys]
            if len(waiting) == before:
                break
    broken.update(dict.fromkeys(_circles(config, waiting), "leads back to itself, or through too many others"))
    return broken


def _take_out(node: Any, config: DictConfig, keys: Keys, waiting: dict[Keys, str]) -> None:
    """Put ??? in the place of every interpolation, in both; those that may be followed into `waiting`."""
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
        here = (*keys, str(key))
        if isinstance(child, (dict, list)):
            _take_out(child, config, here, waiting)
        elif isinstance(child, str) and "${" in child:
            node[key] = _node(config, keys)[_last(here, config)] = MISSING
            if not _calls_a_resolver(child):
                waiting[here] = child


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


def _evaluated(config: DictConfig, keys: Keys, text: str) -> Any:
    """What an interpolation gives at its place, which is ??? again afterwards; MISSING for what is no plain value."""
    holder, last = _node(config, keys[:-1]), _last(keys, config)
    try:
        holder[last] = text
        value = holder[last]
    finally:
        holder[last] = MISSING
    if isinstance(value, (DictConfig, ListConfig)):
        return _with_names(OmegaConf.to_container(value, resolve=False))
    if isinstance(value, str) and ("${" in value or len(value) > _LONGEST_TEXT):
        return MISSING  # it was escaped, and others would take it for an interpolation; or it is a bomb
    return value


def _circles(config: DictConfig, waiting: Mapping[Keys, str]) -> list[Keys]:
    """Of the interpolations left over, those that stay so if every ??? is given: they lead in a circle."""
    left = dict(waiting)
    if not left:
        return []  # OmegaConf takes a second for a copy of a large tree
    given = OmegaConf.create(_filled(OmegaConf.to_container(config, resolve=False), (), left))
    for _ in range(_ROUNDS):
        for keys, text in list(left.items()):
            try:
                _evaluated(given, keys, text)
            except (MissingMandatoryValue, InterpolationToMissingValueError):
                continue
            except OmegaConfBaseException:
                pass  # it names a part of what is not given
            _node(given, keys[:-1])[_last(keys, given)] = 0
            del left[keys]
    return list(left)


def _filled(node: Any, keys: Keys, kept: Mapping[Keys, str]) -> Any:
    """With 0 for every ??? but the kept ones."""
    if isinstance(node, dict):
        return {key: _filled(value, (*keys, str(key)), kept) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, (*keys, str(index)), kept) for index, value in enumerate(node)]
    return 0 if node == MISSING and keys not in kept else node


def _node(config: Any, keys: Keys) -> Any:
    for key in keys:
        config = config[int(key) if isinstance(config, (list, ListConfig)) else key]
    return config


def _last(keys: Keys, config: Any) -> Any:
    return int(keys[-1]) if isinstance(_node(config, keys[:-1]), (list, ListConfig)) else keys[-1]


def _put(tree: Any, keys: Keys, value: Any) -> None:
    _node(tree, keys[:-1])[_last(keys, tree)] = value


def _size(node: Any) -> int:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return 1 + sum(map(_size, children))


def _holds_missing(node: Any) -> bool:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return node == MISSING or any(map(_holds_missing, children))


def _mark_unknown(node: Any) -> None:
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(child, (dict, list)):
            _mark_unknown(child)
        elif child == MISSING:
            node[key] = UNKNOWN


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
