"""One NeMo training config:
its values as OmegaConf gives them, with Hydra's overrides, and where each comes from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import UNKNOWN, Keys, walk, with_names
from nemo_patches.tools.doctor.yaml_text import YamlText

_LONGEST_SHOWN = 100  # characters of a value in a finding
_LARGEST_NUMBER = 1e15
_MOST_FILES = 30  # of inputs, that may name each other
IN_FILES = ("input_cfg", "datasets")  # what may be named as a file
# That NeMo's training scripts read.
SECTIONS = ("model", "data", "trainer", "exp_manager")


@dataclass(frozen=True)
class Value:
    """One value that a rule read.

    origin: "line 12"; "override"; "default" where it is nowhere.
    line: where the value is in the config, or else the section that it belongs in; None where the
    config has neither.
    """

    key: str
    value: Any
    origin: str
    line: int | None = field(default=None, compare=False)

    @property
    def keys(self) -> Keys:
        return tuple(self.key.split("."))

    @property
    def text(self) -> str:
        return "null" if self.value is None else repr(self.value)

    @property
    def on(self) -> bool:
        """Whether it is true; a value that is not known is neither on nor off."""
        return self.value is True

    @property
    def off(self) -> bool:
        return self.value is False

    @property
    def whole(self) -> bool:
        """Whether it is a whole number; a boolean is none."""
        return type(self.value) is int

    @property
    def named(self) -> bool:
        return isinstance(self.value, str)

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
        # Not so for NaN.
        return float(self.value) if abs(self.value) < _LARGEST_NUMBER else None

    @property
    def batches(self) -> int | float | None:
        """A limit in batches as Lightning takes it: a whole number, or a share, as null is 1.0;
        1000.0 is 1000, true is 1. None for what it refuses, and what is not known.
        """
        if self.value is None:
            return 1.0
        if isinstance(self.value, bool):
            return int(self.value)
        number = self.number
        if number is None or number < 0 or (number > 1 and number % 1):
            return None
        return int(number) if number > 1 or self.whole else number

    @property
    def open(self) -> bool:
        """Whether with this limit each rank reads on until its own data end, for certain."""
        return isinstance(self.batches, float) and self.batches > 0

    def __str__(self) -> str:
        text = "null" if self.value is None else str(self.value)
        text = text.lower() if isinstance(self.value, bool) else text
        if len(text) > _LONGEST_SHOWN:
            text = f"{text[:_LONGEST_SHOWN]}..."
        where = "NOT SET, the default" if self.origin == "default" else self.origin
        return f"{self.key}: {text} ({where})"


@dataclass(frozen=True)
class Config:
    """A config as the job would get it: `tree` of plain values, UNKNOWN where it cannot be told.

    broken: the paths of interpolations that lead nowhere, with OmegaConf's reason. of_machine: of
    values that only a resolver on the job's machine would give.
    """

    source: YamlText
    tree: Mapping[str, Any]
    overridden: frozenset[Keys]
    broken: Mapping[Keys, str]
    of_machine: frozenset[Keys] = frozenset()

    def get(self, path: Keys | str, default: Any = None) -> Value:
        """The value at a path; `default` (what NeMo or Lightning assumes) where the config has
        none.
        """
        keys = tuple(path.split(".")) if isinstance(path, str) else path
        node: Any = self.tree
        for key in keys:
            if node is UNKNOWN:
                break
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return self._value(keys, default, "default")
        return self._value(keys, node)

    def _value(self, keys: Keys, value: Any, origin: str = "") -> Value:
        line = self.source.line(keys)
        overridden = any(
            keys[: len(given)] == given or given[: len(keys)] == keys
            for given in self.overridden
        )
        origin = origin or ("override" if overridden else f"line {line}")
        return Value(".".join(keys), value, origin=origin, line=line)

    def mappings(self) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
        """Every mapping in it with its path, outer before inner.

        Beside a model, other sections than NeMo's own hold what the config is written with:
        templates for anchors.
        """
        top = {
            key: value
            for key, value in self.tree.items()
            if key in SECTIONS or "model" not in self.tree
        }
        return ((keys, node) for keys, node in walk(top) if isinstance(node, dict))


@dataclass(frozen=True)
class Section:
    """A mapping at a path of a config, be it there or not.

    outer: the section in which keys are looked up that it does not have.
    """

    config: Config
    keys: Keys
    outer: Section | None = None

    @property
    def where(self) -> str:
        return ".".join(self.keys)

    def own(self, path: str, default: Any = None) -> Value:
        return self.config.get((*self.keys, *path.split(".")), default)

    def get(self, path: str, default: Any = None) -> Value:
        own = self.own(path, default)
        return own if own.given or not self.outer else self.outer.get(path, default)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config. Raises DoctorError for a file that cannot be read, or an override that does
    not fit it.

    Of interpolations, those that name a key are followed. A resolver (${oc.env:HOME}, ${now:%Y}, a
    training script's own) is never called: what it would give belongs to the job's environment, and
    may be a secret. It is UNKNOWN.
    """
    return with_overrides(yaml_text.read(path), overrides)


def with_overrides(source: YamlText, overrides: Sequence[str] = ()) -> Config:
    """The same for a text that was read already."""
    from nemo_patches.tools.doctor.interpolations import resolve  # and OmegaConf: 0.2 s

    tree = deepcopy(source.tree)
    _check_defaults(source, tree)
    tree, overridden = _with_overrides(source.path, tree, overrides)
    found = resolve(source, tree)
    _read_inputs(tree)
    return Config(
        source=source,
        tree=tree,
        overridden=overridden,
        broken=found.broken,
        of_machine=frozenset(found.of_machine),
    )


def _read_inputs(tree: Any) -> None:
    """Put the inputs of each file that an input_cfg names in its place, and MagpieTTS's datasets,
    as NeMo does, which looks for it where the job runs. One that cannot be read stays a name.
    """
    room = _MOST_FILES
    for _, node in walk(tree):  # goes on into what was put in
        for key in IN_FILES if isinstance(node, dict) else ():
            name = node.get(key)
            if isinstance(name, str) and room:
                room -= 1
                with contextlib.suppress(DoctorError):
                    node[key] = yaml_text.read(Path(name), "sequence").tree


def _check_defaults(source: YamlText, tree: Mapping[str, Any]) -> None:
    """Refuse what Hydra composes of several files: a verdict on one of them would be none on the
    job.
    """
    entries = tree.get("defaults")
    names = [
        str(name).rpartition(" ")[2]
        for entry in (entries if isinstance(entries, list) else ())
        for name in (entry if isinstance(entry, dict) else [entry])
    ]
    # This file itself, and Hydra's own part: a launcher, how it logs.
    if not all(name == "_self_" or name.startswith("hydra/") for name in names):
        raise DoctorError(
            f"{source.path}:{source.line(('defaults',))}: composed by Hydra of other"
            " files, which are not read; examine the composed config: python train.py"
            " ... --cfg job > composed.yaml"
        )


# --- overrides


def _with_overrides(
    path: Path, tree: dict[str, Any], texts: Sequence[str]
) -> tuple[dict[str, Any], frozenset[Keys]]:
    """The tree after Hydra's overrides, in their order, and the paths that they are for."""
    if not texts:
        return tree, frozenset()
    from hydra._internal.config_loader_impl import ConfigLoaderImpl  # 0.2 s
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parser = OverridesParser.create()
    given: set[Keys] = set()
    text = ""
    try:
        whole = OmegaConf.create(tree)
        OmegaConf.set_struct(whole, True)
        for text in texts:
            override = parser.parse_override(text)
            if override.is_hydra_override():  # how the script logs, and where it runs
                continue
            if override.package is not None or "/" in override.key_or_group:
                raise ValueError("it chooses a file of a group, and those are not read")
            if override.is_sweep_override():
                raise ValueError("a sweep; the doctor examines one job at a time")
            ConfigLoaderImpl._apply_overrides_to_config([override], whole)
            given.add(tuple(override.key_or_group.split(".")))
    except Exception as error:  # what Hydra raises has no common class
        raise DoctorError(
            f"{path}: override {text!r} is not allowed: {' '.join(str(error).split())}"
        ) from None
    return with_names(OmegaConf.to_container(whole)), frozenset(given)
