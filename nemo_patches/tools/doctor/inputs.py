"""How NeMo's Lhotse loader reads a set's inputs:
as a stream or not, for ever or once, and what draws their order.

The table is NeMo's own registry of input types, 2.1 to 3.0; tests/test_doctor_streams.py compares
it with the installed one, and runs each type on two ranks. What it does not have is unknown, never
"no stream". Of NeMo 2.1 the rest is not measured alike: docs/doctor.md has what differs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_patches.tools.doctor import known_keys
from nemo_patches.tools.doctor.config import Section, Value

# What decides whether an input is a stream, which each worker of each rank reads whole, by the name
# of its type.
READS: dict[str, str] = {
    name: reads for name, (reads, _) in known_keys.TABLE["types_of_inputs"].items()
}
_ENDS = tuple[str, ...](known_keys.TABLE["sets"]["ends_a_repetition"])


@dataclass(frozen=True)
class Draw:
    """An order that is drawn at random. certain: whether it changes anything whatever the data (not
    so of one file).
    """

    seed: Value
    certain: bool


@dataclass(frozen=True)
class Inputs:
    """How inputs are read; None where that cannot be told.

    stream: whether each worker of each rank reads all of it by itself. endless: whether it is
    repeated for ever.
    unknown: why nothing is said of seeds. refused: whether NeMo stops, as both kinds are mixed.
    """

    stream: bool | None
    endless: bool | None
    draws: tuple[Draw, ...] = ()
    unknown: str = ""
    refused: bool = False


def of_set(place: Section, one_by_one: bool = False) -> Inputs:
    """A set, or an entry that is read like one. one_by_one: each of several manifests is a set of
    its own.
    """
    if place.own("input_cfg").value is not None:
        return _of_entries(place)
    if place.own("shar_path").value is None and place.own("cuts_path").value is None:
        return _of_manifests(place, one_by_one)
    return _of_lhotse(place)


def any_known(answers: Sequence[bool | None]) -> bool | None:
    """True if one is, else None if one is not known."""
    if True in answers:
        return True
    return None if None in answers else False


def _of_entries(place: Section) -> Inputs:
    """Those of an input_cfg: with one it is that one, of several NeMo draws which comes next."""
    listed = place.own("input_cfg")
    if not isinstance(listed.value, list) or not listed.value:
        file = "in another file, which is not read"
        what = file if listed.named else "no list that can be read"
        return Inputs(None, None, unknown=f"{listed.key} is {what}")
    parts = [_of_entry(place, index, entry) for index, entry in enumerate(listed.value)]
    if len(parts) == 1:
        return parts[0]
    stream, refused = _mixed(place, [part.stream for part in parts])
    refused = refused or any(part.refused for part in parts)
    ends = [part.endless for part in parts] + [_repeated(True, place, _ENDS)]
    draws = [draw for part in parts for draw in part.draws]
    return Inputs(
        stream=stream,
        endless=None if refused else any_known(ends),
        draws=(*draws, Draw(place.get("shard_seed"), certain=True)),
        unknown=next((part.unknown for part in parts if part.unknown), ""),
        refused=refused,
    )


def _mixed(place: Section, kinds: list[bool | None]) -> tuple[bool | None, bool]:
    """Of which kind several inputs are together, and whether NeMo refuses them: it does for both
    kinds, unless one is forced, and the first one's counts then. So one that is known tells of the
    others."""
    known = {kind for kind in kinds if kind is not None}
    if len(known) < 2:
        return next(iter(known), None), False
    forced = any_known(
        [_on(place.get(f"force_{kind}_dataset")) for kind in ("map", "iterable")]
    )
    return (kinds[0], False) if forced else (None, forced is False)


def _of_entry(place: Section, index: int, entry: Any) -> Inputs:
    keys = (*place.own("input_cfg").keys, str(index))
    inner = Section(place.config, keys, outer=place)
    name = inner.own("type")
    reads = READS.get(name.value) if isinstance(entry, dict) and name.named else None
    if reads == "STREAM":
        return Inputs(True, _repeated(True, inner), _order_of_files(inner))
    if reads == "TARRED":
        return _of_manifests(inner)
    if reads == "SHAR":
        return _of_lhotse(inner)
    if reads == "AS_SET":
        return of_set(inner)
    if reads == "GROUP":
        return _of_entries(inner)
    if reads == "SIMULATED":
        what = "drawn from the process's own random numbers, whatever shard_seed is"
        unknown = f"{name.key}: {name.value} is {what}"
        return Inputs(_on(inner.own("is_tarred")), True, unknown=unknown)
    what = name.value if name.known and name.value is not None else "it"
    unknown = f"{name.key}: {what} is no type of input that is known of NeMo"
    return Inputs(None, None, unknown=unknown)


def _of_manifests(place: Section, one_by_one: bool = False) -> Inputs:
    """NeMo's manifests, with or without tar files; a list of them is mixed, and repeated like a
    stream.
    """
    stream, unknown = _given(place, "tarred_audio_filepaths")
    manifests = place.own("manifest_filepath").value
    listed = isinstance(manifests, list) and not one_by_one
    draws = _order_of_files(place)
    if listed and len(manifests) > 1:
        draws = (*draws, Draw(place.get("shard_seed"), certain=True))
    return Inputs(
        stream, _repeated(listed or stream, place, _ENDS), draws=draws, unknown=unknown
    )


def _of_lhotse(place: Section) -> Inputs:
    """Lhotse's cuts, or Shar, which is always shuffled, and of which a list is mixed."""
    stream, unknown = _given(place, "shar_path")
    if stream is False:
        return Inputs(False, False)
    listed = isinstance(place.own("shar_path").value, list)
    endless = _repeated(stream, place, _ENDS[:1] if listed else _ENDS)
    draw = Draw(place.get("shard_seed"), certain=True)
    return Inputs(stream, endless, draws=(draw,), unknown=unknown)


def _repeated(
    repeats: bool | None, place: Section, unless: tuple[str, ...] = _ENDS[:1]
) -> bool | None:
    """Whether an input is repeated for ever: one that NeMo repeats, unless one of these switches is
    on.
    """
    ends = any_known([_on(place.get(switch)) for switch in unless])
    if repeats is False or ends:
        return False
    return True if repeats and ends is False else None


def _order_of_files(place: Section) -> tuple[Draw, ...]:
    """The draw of shuffle; it may not matter, as there may be only one file."""
    if _on(place.get("shuffle")) is False:
        return ()
    return (Draw(place.get("shard_seed"), certain=False),)


def _on(switch: Value) -> bool | None:
    """A switch as NeMo reads it: null is off."""
    return bool(switch.value) if switch.known else None


def _given(place: Section, key: str) -> tuple[bool | None, str]:
    """Whether a path is given, and why that is not known. Of one that is not known it is, where
    text stands around an interpolation.
    """
    path = place.own(key)
    if path.known:
        return path.value is not None, ""
    node = place.config.source.nodes.get(path.keys)
    text = str(getattr(node, "value", ""))
    if "${" in text and not (text.startswith("${") and text.endswith("}")):
        return True, ""
    return None, f"{path.key} is not known"
