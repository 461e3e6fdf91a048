"""Of all triples of rank states: what a rank says live, leaves in the job's folder and in its trace,
and writes into the log, name the same ranks, and nobody whom the live line does not.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import report_of
from rank_states import found, state
from simulated_traces import Setup, file_name, header
from test_who_is_not_to_blame import CALLS, ENCODER, OURS, call, traced

from nemo_patches.channel.answers import ENDED, LEFT, NO_ANSWER, NOT_COME, NOT_HEARD
from nemo_patches.facts import CALLING, COMPUTING, MOVING, RankFacts
from nemo_patches.judging.answer import Answer, RoundQuestion, answered
from nemo_patches.judging.kinds import CHECKPOINT
from nemo_patches.judging.rank_groups import grouped
from nemo_patches.judging.verdict import Verdict, judged
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.sources.report_files import (
    decode,
    diagnose_answer,
    evidence_of,
)
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
SIZE, IDLE_S = 3, 60.0
SILENT = {
    "gone": ENDED,
    "left": LEFT,
    "mute": NO_ANSWER,
    "absent": NOT_COME,
    "unheard": NOT_HEARD,
}


def states_of(rank: int) -> dict[str, RankFacts]:
    gradients = "backward, which reduces the gradients"
    away = state(rank, "forward (model.py:1)")
    request = state(rank, "get (queue.py:1)")
    return {
        "gradients": state(rank, "step (train.py:7)", gradients),
        "broadcast": state(rank, "sync (train.py:3)", "broadcast"),
        "perhaps": state(rank, "item (train.py:1)", "perhaps the GPU"),
        "reads": state(rank, "read (data.py:41)"),
        "sleeps": replace(state(rank, "get (queue.py:1)"), sleeps=True, still=IDLE_S),
        "saves": replace(state(rank, "save (ckpt.py:1)"), activity=CHECKPOINT),
        "calls": replace(away, goes_on=CALLING),
        "moves": replace(away, collective=gradients, goes_on=MOVING),
        "computes": replace(away, goes_on=COMPUTING),
        "is asked": replace(request, request="input()"),
    }


def verdicts(kinds: tuple[str, ...]) -> Iterator[tuple[int, Verdict]]:
    """What is said live, at first and once it has lasted, and by whom."""
    known = {
        rank: states_of(rank)[kind]
        for rank, kind in enumerate(kinds)
        if kind not in SILENT
    }
    silent = {rank: SILENT[kind] for rank, kind in enumerate(kinds) if kind in SILENT}
    if known:
        first = judged(grouped(found(*known.values(), size=SIZE, silent=silent)))
        yield min(known), first
        if first.level < logging.WARNING and not first.stays_info:
            yield min(known), first.overdue(IDLE_S)


def accused(report: Diagnosis) -> set[int]:
    return {
        rank
        for one in report.findings
        if one.severity == CRITICAL
        for rank in one.ranks
    }


def by_report(rank: int, live: Verdict) -> list[Diagnosis]:
    """As the answer to --job and, of a warning, as a file."""
    content = {
        "rank": rank,
        "time": 1e9,
        "world_size": SIZE,
        "level": logging.getLevelName(live.level),
        "idle_s": IDLE_S,
        "text": live.text(),
        "groups": [group.to_json() for group in live.groups],
    }
    answer = decode(json.dumps(content).encode())
    asked = diagnose_answer(answer, "", ())
    warns = live.level >= logging.WARNING
    return [asked, judge(evidence_of(answer))] if warns else [asked]


def by_log(rank: int, live: Verdict, folder: Path) -> Diagnosis:
    ours = OURS.format(rank).replace("WARNING", logging.getLevelName(live.level))
    file = folder / "train.log"
    file.write_text(f"{ours}no encoder call for {IDLE_S:.0f} s. {live.text()}\n")
    return report_of(file)


def by_trace(rank: int, live: Verdict, folder: Path) -> Diagnosis:
    stalled = records.Stalled(
        t=IDLE_S,
        e="",
        n=0,
        ranks=[one.rank for one in live.missing],
        kinds=[one.kind for one in live.missing],
        where=[one.where for one in live.missing],
        text=live.text(),
        waited=live.level >= logging.WARNING,
        groups=[group.to_json() for group in live.groups],
    )
    lines = [header(rank, SIZE, 1000.0, Setup()), *call(1), stalled]
    file = folder / file_name(rank, 1000.0)
    file.write_bytes(b"".join(map(records.encode, lines)))
    try:
        return report_of(file)
    finally:
        file.unlink()


def test_all_that_a_rank_leaves_names_whom_its_line_names(tmp_path: Path) -> None:
    names = [*states_of(0), *SILENT]
    count = 0
    for kinds in itertools.combinations_with_replacement(names, SIZE):
        gone = {rank for rank, kind in enumerate(kinds) if kind in SILENT}
        for rank, live in verdicts(kinds):
            count += 1
            asked, *file = by_report(rank, live)
            told = accused(asked)
            sources = [
                *file,
                by_log(rank, live, tmp_path),
                by_trace(rank, live, tmp_path),
            ]
            assert [accused(one) for one in sources] == [told] * len(sources), kinds
            if live.level < logging.WARNING:
                assert not told, kinds
                continue
            missing = {one.rank for one in live.missing}
            more = told - missing
            # While one computes the live line names nobody, and tells of those that are gone.
            assert not more or (more <= gone and "computes" in kinds), kinds
    assert count > 700


def rounds() -> Iterator[tuple[tuple[object, ...], Answer]]:
    """Who is missing from a round that rank 0 has given up, by what the ranks say and by which of
    them have come to it.
    """
    number = CALLS + 1
    heard = [(kind, came) for kind in states_of(0) for came in (True, False)]
    others = [*heard, *((kind, False) for kind in SILENT)]
    for own, *kinds in itertools.product(("gradients", "reads"), others, others):
        known = [replace(states_of(0)[own], rounds={ENCODER: number})]
        silent = {}
        for rank, (kind, came) in enumerate(kinds, 1):
            if kind in SILENT:
                silent[rank] = SILENT[kind]
            else:
                at = number if came else number - 1
                known.append(replace(states_of(rank)[kind], rounds={ENCODER: at}))
        look = found(*known, size=SIZE, silent=silent)
        yield (own, *kinds), answered(RoundQuestion(ENCODER, number, None), look, None)


def test_of_a_round_nobody_else_is_accused_than_the_live_line_names(
    tmp_path: Path,
) -> None:
    """Those that wait themselves are named there, and accused by none."""
    count = 0
    for kinds, answer in rounds():
        missing = {one.rank for one in answer.missing}
        if not missing:
            continue
        count += 1
        waiting = {one.rank for one in answer.missing if one.collective}
        line = (
            f"{OURS.format(0)}{ENCODER}: training call {CALLS + 1}: not every rank's length"
            f" came within 3.00 s; using this rank's own, 100. Missing: {answer.text(SIZE)}"
        )
        log = tmp_path / "train.log"
        log.write_text(f"{line}\n")
        stalled = records.Stalled(
            t=7.0,
            e=ENCODER,
            n=CALLS + 1,
            ranks=[one.rank for one in answer.missing],
            kinds=[one.kind for one in answer.missing],
            where=[one.where for one in answer.missing],
            collectives=[one.collective for one in answer.missing],
            text=answer.unknown,
        )
        traced(tmp_path, 0, *call(CALLS + 1, records.TIMEOUT), stalled)
        trace = tmp_path / file_name(0, 1000.0)
        told = [accused(report_of(one)) for one in (trace, log)]
        assert told[0] == told[1], kinds
        assert missing - waiting <= told[0] <= missing, kinds
    assert count > 700
