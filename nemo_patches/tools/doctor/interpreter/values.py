"""Abstract values: how surely ranks differ in something, and what it is on a job's members."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.members import Column, Open

# The same on all ranks; unknown; this rank's data, of the same form on all; or read off data, time,
# files, errors or the rank.
SAME, UNKNOWN, DATA, VARIES = range(4)


class Abstract(NamedTuple):  # much faster to make, compare and hash than a dataclass
    """What is known of an expression.

    at: what it is on each member. count: how surely ranks differ in its number of items; item: one
    of them; parts: those of a tuple; entries: those of a dict or an object, by key or attribute.
    ref: the function, class or lambda that it is, or, of another file's, its name.
    """

    level: int = SAME
    at: Column | None = None
    tags: frozenset[str] = frozenset()
    count: int | None = None  # type: ignore[assignment]
    item: Abstract | None = None
    parts: tuple[Abstract, ...] = ()
    ref: Any = None
    entries: tuple[tuple[object, Abstract], ...] = ()

    def entry(self, key: object) -> Abstract | None:
        return next((value for name, value in self.entries if name == key), None)

    def with_entry(self, key: object, value: Abstract) -> Abstract:
        others = [each for each in self.entries if each[0] != key]
        return self._replace(entries=(*others, (key, value)))

    @property
    def turns(self) -> int:
        """How surely ranks differ in how often a loop over it goes round."""
        if self.has("full"):  # batches are of one size
            return SAME
        return self.level if self.count is None else self.count

    def has(self, *tags: str) -> bool:
        return not self.tags.isdisjoint(tags)

    def tagged(self, *tags: str) -> Abstract:
        union = self.tags.union(tags)
        return self if union == self.tags else self._replace(tags=union)

    def without(self, *tags: str) -> Abstract:
        return (
            self._replace(tags=self.tags.difference(tags)) if self.has(*tags) else self
        )

    @property
    def decided(self) -> bool | None:
        """What a test says wherever there are several ranks; None where that depends."""
        said = {
            None if isinstance(each, Open) else bool(each)
            for each in self.at or (Open(),)
        }
        return said.pop() if len(said) == 1 else None


Environment = dict[str, Abstract]  # what is known of each name


def tagged(*tags: str, level: int = SAME) -> Abstract:
    return Abstract(level, tags=frozenset(tags))


# What holds of a value of two paths only if it holds of both, or is of one path alone.
_OF_BOTH = {"agreed", "const", "full", "new", "nothing"}
AGREED = tagged("agreed")
_NO_TAGS = frozenset[str]()
WRAPPED_AT = "wrapped at "  # a tag: and the line
FILLED = "filled "  # a tag of a dict: and the key
IN_A_GROUP = " in a group"  # and this, if it is not wrapped for all ranks


def modules_in(tags: frozenset[str]) -> frozenset[str]:
    """The modules that were wrapped, each by its place, that something is computed by."""
    return frozenset(each for each in tags if each.startswith(WRAPPED_AT))


@lru_cache(maxsize=1000)
def carried(tags: frozenset[str]) -> frozenset[str]:
    return tags & knowledge.CARRIED | modules_in(tags)


def mixed(values: Sequence[Abstract]) -> Abstract:
    """Of something that is made of these."""
    tags = _NO_TAGS.union(*[each.tags for each in values])
    level = max([each.level for each in values], default=SAME)
    if not tags:  # as with most
        return Abstract(level)
    agreed = tags & AGREED.tags if level == SAME else _NO_TAGS
    kept = carried(tags) | agreed
    if values and all(each.has("one device") for each in values):
        kept |= {"one device"}
    return Abstract(level, tags=kept - {"named"} if level >= DATA else kept)


def joined(one: Abstract, other: Abstract) -> Abstract:
    """Of two paths that the ranks are not known to part on."""
    if one is other or one == other:
        return one
    counts = [each.count for each in (one, other) if each.count is not None]
    return Abstract(
        level=max(one.level, other.level),
        at=one.at if one.at == other.at else None,
        tags=(one.tags | other.tags) - _OF_BOTH | one.tags & other.tags & {"nothing"},
        count=max(counts, default=None),
        item=one.item or other.item,
        ref=one.ref or other.ref,
        entries=one.entries if one.entries == other.entries else (),
    )
