"""What the ranks of a job told each other for `doctor --ranks`.

As rules go by it, and as it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from nemo_patches.text import named, safe
from nemo_patches.tools import counted


@dataclass(frozen=True)
class Facts:
    """What a rank publishes about itself: what ought to be the same on all ranks, each by name.

    settings: of nemo_patches, and whether NeMo is patched there. environment: variables of NCCL,
    torch and Gloo.
    loaders: what the config given makes of the data loaders there; empty where none was given.
    """

    rank: int
    host: str
    pid: int
    versions: dict[str, str]
    settings: dict[str, str]
    environment: dict[str, str]
    loaders: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    """What rank 0 collected, by rank; a rank without facts has not answered within the timeout."""

    size: int
    timeout: timedelta
    facts: Mapping[int, Facts] = field(default_factory=dict)

    @property
    def hosts(self) -> set[str]:
        return {facts.host for facts in self.facts.values()}

    @property
    def headline(self) -> str:
        return (
            f"{len(self.facts)} of {self.size} ranks answered, on"
            f" {counted(len(self.hosts), 'host')}"
        )

    def lines(self) -> list[str]:
        """One line for each setting of the data loaders that is the same on all ranks."""
        every = [facts.loaders for _, facts in sorted(self.facts.items())]
        return [
            f"on all of them {name}: {text}"
            for name, text in (every[0] if every else {}).items()
            if all(other.get(name) == text for other in every)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": [
                msgspec.to_builtins(facts) for _, facts in sorted(self.facts.items())
            ]
        }


def differing(
    ranks: Ranks, what: Callable[[Facts], Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Each name whose value differs between ranks, with its values and their ranks; the most
    frequent value last.
    """
    names = {name for facts in ranks.facts.values() for name in what(facts)}
    for name in sorted(names):
        which: dict[str, list[int]] = {}
        for rank, facts in sorted(ranks.facts.items()):
            which.setdefault(what(facts).get(name, "not set"), []).append(rank)
        by_size = sorted(which.items(), key=lambda pair: -len(pair[1]))
        if len(which) > 1:
            texts = [f"{safe(text)} on {_where(ranks, some)}" for text, some in by_size]
            yield name, ", ".join(reversed(texts))


def _where(ranks: Ranks, some: list[int]) -> str:
    """The ranks, and their host where that tells them from others."""
    hosts = {ranks.facts[rank].host for rank in some}
    if len(hosts) == 1 < len(ranks.hosts):
        return f"{named(some)} ({hosts.pop()})"
    return named(some)
