"""One NeMo training config:
its values as OmegaConf gives them, with Hydra's overrides, and where each comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_patches.tools.doctor import input_files, interpolations, yaml_text
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.input_files import Unread
from nemo_patches.tools.doctor.interpolations import (
    UNKNOWN,
    first_line,
)
from nemo_patches.tools.doctor.trees import Keys, entries, with_names
from nemo_patches.tools.doctor.yaml_text import YamlText

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_LONGEST_SHOWN = 100  # characters of a value in a finding
_LARGEST_NUMBER = 1e15
# That NeMo's training scripts read.
SECTIONS = ("model", "data", "trainer", "exp_manager")


@dataclass(frozen=True)
class Value:
    """One value that a rule read.

    origin: "line 12"; "override"; "inputs.yaml:3", of a file that the config names; "default" where
    it is nowhere.
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

    def __str__(self) -> str:
        text = "null" if self.value is None else str(self.value)
        text = text.lower() if isinstance(self.value, bool) else text
        where = "NOT SET, the default" if self.origin == "default" else self.origin
        return (
            f"{self.key}:"
            f" {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}"
            f" ({where})"
        )


@dataclass(frozen=True)
class Config:
    """A config as the job would get it: `tree` of plain values, UNKNOWN where it cannot be told.

    broken: the paths of interpolations that lead nowhere, with OmegaConf's reason. of_machine: of
    values that only a
    resolver on the job's machine would give. files: each file whose inputs are in the tree, by the
    path of the input_cfg that names it; unread: why one is not there.
    """

    source: YamlText
    tree: Mapping[str, Any]
    overridden: frozenset[Keys]
    broken: Mapping[Keys, str]
    of_machine: frozenset[Keys] = frozenset()
    files: Mapping[Keys, YamlText] = field(default_factory=dict)
    unread: Mapping[Keys, Unread] = field(default_factory=dict)

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
                return Value(
                    ".".join(keys),
                    default,
                    origin="default",
                    line=self.source.line(keys),
                )
        return Value(
            ".".join(keys), node, origin=self.origin(keys), line=self.source.line(keys)
        )

    def origin(self, keys: Keys) -> str:
        for depth in range(len(keys) - 1, 0, -1) if self.files else ():
            if (file := self.files.get(keys[:depth])) is not None:
                return f"{file.path}:{file.line(keys[depth:])}"
        if any(
            keys[: len(given)] == given or given[: len(keys)] == keys
            for given in self.overridden
        ):
            return "override"
        line = self.source.line(keys)
        return f"line {line}" if line else "default"

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
        waiting: list[tuple[Keys, Any]] = [((), top)]
        while waiting:
            keys, node = waiting.pop(0)
            if isinstance(node, dict):
                yield keys, node
            waiting += [
                ((*keys, key), child)
                for key, child in entries(node)
                if isinstance(child, (dict, list))
            ]


@dataclass(frozen=True)
class Section:
    """A mapping at a path of a config, be it there or not."""

    config: Config
    keys: Keys

    @property
    def where(self) -> str:
        return ".".join(self.keys)

    def get(self, path: str, default: Any = None) -> Value:
        return self.config.get((*self.keys, *path.split(".")), default)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config. Raises DoctorError for a file that cannot be read, or an override that does
    not fit it.

    Of interpolations, those that name a key are followed. A resolver (${oc.env:HOME}, ${now:%Y}, a
    training script's own) is never called: what it would give belongs to the job's environment, and
    may be a secret. It is UNKNOWN.
    """
    return with_overrides(yaml_text.read(path), overrides)


def with_overrides(source: YamlText, overrides: Sequence[str] = ()) -> Config:
    """The same for a text that was read already; the files that an input_cfg names are read here,
    too.
    """
    tree = deepcopy(source.tree)
    _check_defaults(source, tree)
    overridden = _overridden(source.path, tree, overrides)
    found = interpolations.resolve(source, tree)
    files, unread = input_files.read_into(tree, found)
    return Config(
        source=source,
        tree=tree,
        overridden=overridden,
        broken=found.broken,
        of_machine=frozenset(found.of_machine),
        files=files,
        unread=unread,
    )


def _check_defaults(source: YamlText, tree: Mapping[str, Any]) -> None:
    """Refuse what Hydra composes of several files: a verdict on one of them would be none on the
    job.
    """
    entries = tree.get("defaults")
    if isinstance(entries, list) and not all(
        _changes_no_value(entry) for entry in entries
    ):
        raise DoctorError(
            f"{source.path}:{source.line(('defaults',))}: composed by Hydra of other"
            " files, which are not read; examine the composed config: python train.py"
            " ... --cfg job > composed.yaml"
        )


def _changes_no_value(entry: Any) -> bool:
    """Whether an entry of the defaults is this file itself, or is on Hydra's own part: a launcher,
    how it logs.
    """
    names = list(entry) if isinstance(entry, dict) else [entry]
    return all(
        name == "_self_" or str(name).rpartition(" ")[2].startswith("hydra/")
        for name in names
    )


# --- overrides


def _overridden(
    path: Path, tree: dict[str, Any], texts: Sequence[str]
) -> frozenset[Keys]:
    """Apply Hydra's overrides in place, in their order, and return the paths that they are for."""
    if not texts:
        return frozenset()
    from hydra.core.override_parser.overrides_parser import OverridesParser  # 0.2 s
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    given = []
    for text in texts:
        try:
            override = parser.parse_override(text)
            # Which is how the training script logs, and where it runs.
            if not override.is_hydra_override():
                given.append(_override(tree, override))
        except _Refused as why:
            raise DoctorError(f"{path}: override {_shown(text)}{why}") from None
        except (HydraException, ValueError, RecursionError) as error:
            raise DoctorError(
                f"{path}: override {_shown(text)} is not allowed: {first_line(error)}"
            ) from None
    return frozenset(given)


class _Refused(Exception):
    """An override that cannot be applied: what follows its text in the sentence on that."""


def _override(tree: dict[str, Any], override: Override) -> Keys:
    if override.package is not None or "/" in override.key_or_group:
        raise _Refused(" chooses a file of a group, and those are not read")
    keys = tuple(override.key_or_group.split("."))
    if not all(keys):
        raise _Refused(" is not allowed: a key without a name")
    if override.is_sweep_override():
        raise _Refused(" is a sweep; the doctor examines one job at a time")
    adds = override.is_add() or override.is_force_add()
    holder = _holder(tree, keys, adds)
    last: Any = keys[-1]
    if (
        isinstance(holder, list)
        and last.isdigit()
        and int(last) < len(holder)
        and not override.is_delete()
    ):
        last = int(last)
    elif not isinstance(holder, dict) or (last not in holder and not adds):
        raise _does_not_fit(keys, holder)
    value = with_names(override.value())
    before = holder[last] if isinstance(last, int) else holder.get(last)
    if override.is_delete():
        if value is not None and value != before:
            raise _Refused(f": {'.'.join(keys)} has another value")
        del holder[last]
    elif (
        override.is_add() and before is not None and not isinstance(value, (dict, list))
    ):
        raise _Refused(": it is there already; ++ sets it in any case")
    else:
        holder[last] = _merged(keys, before, value, adds=adds)
    return keys


def _holder(tree: dict[str, Any], keys: Keys, adds: bool) -> Any:
    """The mapping or list that the last key is in; adds: mappings that are not there are made."""
    holder: Any = tree
    for index, key in enumerate(keys[:-1]):
        if isinstance(holder, list) and key.isdigit() and int(key) < len(holder):
            holder = holder[int(key)]
            continue
        if not isinstance(holder, dict) or (key not in holder and not adds):
            raise _does_not_fit(keys[: index + 1], holder)
        if not isinstance(holder.get(key), (dict, list)):
            if not adds and key in holder:
                raise _does_not_fit(keys[: index + 2], holder[key])
            holder[key] = {}
        holder = holder[key]
    return holder


def _merged(keys: Keys, before: Any, value: Any, *, adds: bool) -> Any:
    """Hydra merges a mapping into the one that is there, and replaces anything else."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    for key in value:
        if key not in before and not adds:
            raise _does_not_fit((*keys, key), before)
    return before | {
        key: _merged((*keys, key), before.get(key), new, adds=adds)
        for key, new in value.items()
    }


def _does_not_fit(keys: Keys, holder: Any) -> _Refused:
    close = (
        get_close_matches(keys[-1], list(holder), 1) if isinstance(holder, dict) else []
    )
    hint = (
        f"; did you mean {'.'.join((*keys[:-1], close[0]))}?"
        if close
        else "; Hydra adds a key with +key=value"
    )
    return _Refused(f": the config has no {'.'.join(keys)}{hint}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
