"""What ranks say of themselves, made up: for tests of how that is merged, judged and printed."""

from __future__ import annotations

from typing import Any

from nemo_patches.channel.answers import NOT_COME, Answers, Silence
from nemo_patches.facts import RankFacts
from nemo_patches.judging.found import Found, found_of


def state(
    rank: int, where: str = "", collective: str = "", **changes: Any
) -> RankFacts:
    facts = {
        "idle": 60.0,
        "still": 60.0,
        "caller": where if collective else "",
        **changes,
    }
    about = (rank, f"node{rank}", 100 + rank, "", "", "Encoder", 40, (40, 0))
    return RankFacts(
        *about, **{"rounds": {}, **facts}, where=where, collective=collective
    )


def answers_of(*states: RankFacts) -> Answers:
    answers = Answers()
    for one in states:
        answers.add(one.key(), {one.rank}, one.to_json(), one.still)
    return answers


def found(
    *states: RankFacts, size: int = 0, silent: dict[int, str] | None = None
) -> Found:
    """silent: by rank, how; the others have not come."""
    size = size or len(states) + len(silent or {})
    answers = answers_of(*states)
    for rank, how in (silent or {}).items():
        answers.add_silent([rank], Silence(how))
    answers.add_silent(range(size), Silence(NOT_COME))
    return found_of(answers, size, (), "")
