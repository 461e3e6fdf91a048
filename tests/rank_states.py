"""What ranks say of themselves, made up: for tests of how that is merged, judged and printed."""

from __future__ import annotations

from typing import Any

from nemo_patches.channel.survey import Silent
from nemo_patches.stall.found import Found
from nemo_patches.stall.rank_state import RankState, answer_of, groups_of, merged


def state(rank: int, where: str = "", collective: str = "", **changes: Any) -> RankState:
    facts = {"idle": 60.0, "still": 60.0, "caller": where if collective else "", **changes}
    about = (rank, f"node{rank}", 100 + rank, "", "", "Encoder", 40, (40, 0))
    return RankState(*about, **{"rounds": {}, **facts}, where=where, collective=collective)


def found(*states: RankState, size: int = 0, silent: dict[int, str] | None = None) -> Found:
    size = size or len(states) + len(silent or {})
    reasons = {rank: Silent(rank, how, 2.0, []) for rank, how in (silent or {}).items()}
    known = {one.rank for one in states} | reasons.keys()
    absent = frozenset(range(size)) - known
    return Found(size, groups_of(merged(map(answer_of, states)), size), reasons, absent=absent)
