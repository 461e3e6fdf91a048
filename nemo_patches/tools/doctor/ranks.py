"""What the ranks of a job told each other for `doctor --ranks`, as rules go by it, and as it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from nemo_patches.text import named, safe

_Value = TypeVar("_Value")
_SHOWN_RANKS = 32  # ranks that are printed one by one


@dataclass(frozen=True)
class Facts:
    """What a rank publishes about itself.

    unpatched: why NeMo would not be patched there, empty where it would. auto_apply: as `nemo-patches status` has it.
    loaders: what the config given makes of the data loaders there, by name; empty where none was given.
    """

    rank: int
    host: str
    pid: int
    device: str
    device_id: str
    versions: dict[str, str]
    settings: dict[str, str]
    environment: dict[str, str]
    unpatched: tuple[str, ...]
    auto_apply: str
    loaders: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What a rank measured, in seconds: each round of the side channel, as the length sync makes them; each request to
    the store; its clock (Unix time) after each round.

    problem: why there is no more.
    """

    rank: int
    syncs: tuple[float, ...] = ()
    requests: tuple[float, ...] = ()
    clocks: tuple[float, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Smoke:
    """How a rank came through the job's backend: the collectives that it ended, in seconds each, over which backend.

    at: the one that it is in, where it came to no end or failed; problem: why, in the backend's words.
    """

    rank: int
    backend: str
    ended: dict[str, float] = field(default_factory=dict)
    at: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Ranks:
    """What rank 0 collected, by rank; a rank without facts has not answered within the timeout.

    smoke: of --nccl, None without it. Ranks with facts that are not in it have not come to the backend's test.
    """

    size: int
    timeout: timedelta
    facts: Mapping[int, Facts] = field(default_factory=dict)
    measured: Mapping[int, Measured] = field(default_factory=dict)
    smoke: Mapping[int, Smoke] | None = None

    @property
    def headline(self) -> str:
        hosts = len({facts.host for facts in self.facts.values()})
        return f"{len(self.facts)} of {self.size} ranks answered, on {hosts} host{'s' * (hosts != 1)}"

    def clock_offset(self, rank: int) -> float | None:
        """How far this rank's clock is ahead of rank 0's, in seconds; right to about the duration of a sync."""
        own, first = self.measured.get(rank), self.measured.get(0)
        if own is None or first is None or not own.clocks or len(own.clocks) != len(first.clocks):
            return None
        return statistics.median(mine - theirs for mine, theirs in zip(own.clocks, first.clocks, strict=True))

    def grouped(self, what: Callable[[Facts], str]) -> dict[str, list[int]]:
        """The ranks by what `what` makes of their facts, the most frequent first."""
        groups = by_value((rank, what(facts)) for rank, facts in sorted(self.facts.items()))
        return dict(sorted(groups.items(), key=lambda item: -len(item[1])))

    def lines(self) -> list[str]:
        """One line for each rank, those with the slowest syncs first where there are many."""
        ranks = sorted(self.facts, key=lambda rank: -_median(self.measured.get(rank, Measured(rank)).syncs))
        shown = sorted(ranks[:_SHOWN_RANKS])
        rest = len(ranks) - len(shown)
        lines = [self._line(rank) for rank in shown] + ([f"{rest} more ranks, with faster syncs"] if rest else [])
        if self.smoke and len({tuple(each.ended) for each in self.smoke.values()}) == 1:
            lines += [self._slowest(name) for name in next(iter(self.smoke.values())).ended]
        return lines + [f"on all of them {name}: {text}" for name, text in self._common_loaders().items()]

    def _slowest(self, name: str) -> str:
        slowest = max((self.smoke or {}).values(), key=lambda each: each.ended[name])
        return f"{name} over {slowest.backend}: {1000 * slowest.ended[name]:.1f} ms at most (rank {slowest.rank})"

    def _common_loaders(self) -> dict[str, str]:
        first, *others = [facts.loaders for _, facts in sorted(self.facts.items())] or [{}]
        return {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}

    def _line(self, rank: int) -> str:
        facts, measured = self.facts[rank], self.measured.get(rank, Measured(rank))
        offset = self.clock_offset(rank)
        parts = [
            f"rank {rank}: {facts.host}, pid {facts.pid}, {facts.device}",
            f"sync {_range(measured.syncs)}",
            f"store {_range(measured.requests)}",
            "clock not measured" if offset is None else f"clock {offset:+.3f} s",
            "would not be patched" if facts.unpatched else f"auto-apply {facts.auto_apply.partition(' ')[0]}",
        ]
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": [
                {
                    **msgspec.to_builtins(facts),
                    "measured": msgspec.to_builtins(self.measured[rank]) if rank in self.measured else None,
                    "clock_offset": self.clock_offset(rank),
                    "smoke": msgspec.to_builtins(self.smoke[rank]) if self.smoke and rank in self.smoke else None,
                }
                for rank, facts in sorted(self.facts.items())
            ]
        }


def by_value(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    groups: dict[_Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


def differing(ranks: Ranks, what: Callable[[Facts], Mapping[str, str]]) -> Iterable[tuple[str, str]]:
    """Each name whose value differs between ranks, with its values and their ranks; the most frequent value last."""
    for name in sorted({name for facts in ranks.facts.values() for name in what(facts)}):
        groups = ranks.grouped(lambda facts, name=name: what(facts).get(name, "not set"))  # type: ignore[misc]
        if len(groups) > 1:
            yield name, ", ".join(f"{safe(text)} on {named(which)}" for text, which in reversed(groups.items()))


def _median(times: tuple[float, ...]) -> float:
    return statistics.median(times) if times else float("inf")


def _range(times: tuple[float, ...]) -> str:
    if not times:
        return "not measured"
    return f"{1000 * min(times):.2f} ms, median {1000 * _median(times):.2f}"
