"""Reader of traces: how each rank ended, where it was, and which rounds and calls it has reached.

A rank's stall reports are about other ranks, and hearsay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.judge import Seat
from nemo_patches.judging.kinds import GONE as PROCESS_GONE
from nemo_patches.judging.kinds import LEFT, UNANNOUNCED
from nemo_patches.judging.kinds import SILENT as NO_HEARTBEAT
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.by_calls import LONG_S
from nemo_patches.tools.diagnose.case import (
    Case,
    StallReports,
    last_entered,
    outcomes_of,
    without_encoders,
)
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.facts import (
    Call,
    Evidence,
    Fact,
    Fate,
    Member,
    Motion,
    Place,
    Value,
)
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.frame_text import shown
from nemo_patches.tools.diagnose.lateness import behind_since
from nemo_patches.tools.diagnose.rank_end import (
    Error,
    ending_failure,
    error_in,
    error_of,
)
from nemo_patches.tools.diagnose.rank_trace import CAME, TIMEOUT
from nemo_patches.tools.diagnose.sources.stall_lines import places_in

_KINDS = {LEFT: fates.GONE, NO_HEARTBEAT: fates.SILENT, UNANNOUNCED: fates.UNSEEN}
_MOST_DETAILS = 4


def read(job: TracedJob, encoders: list[Case], evidence: Evidence) -> None:
    """Add the facts of a launch. Ranks whose files are damaged are only members."""
    evidence.world_size = max(evidence.world_size, job.world_size)
    evidence.moving |= job.moving
    evidence.runs |= bool(job.ago)
    for rank, trace in sorted(job.traces.items()):
        header = trace.header
        member = Member(header.world_size, header.pid)
        at, host = header.started + trace.last, safe(header.host)
        evidence.facts.append(Fact(rank, member, _cite(rank), at, host))
    for case in encoders or [without_encoders(job)]:
        for rank, ending in sorted(case.endings.items()):
            if not ending.unsure:
                evidence.facts += _ends(case, rank, ending)
            if encoders:
                evidence.facts.append(_fact(case, rank, _call(case, rank, ending)))
        evidence.facts += _stall(case, evidence)
        if not evidence.explained:
            _add_seats(case, evidence)
    evidence.facts += _without_files(job, encoders, evidence)


def _without_files(
    job: TracedJob, encoders: list[Case], evidence: Evidence
) -> Iterator[Fact]:
    """Ranks without a file that the others wait for: no round came on any rank."""
    outcomes = outcomes_of(encoders)
    if CAME in outcomes or TIMEOUT not in outcomes:
        return
    for rank in job.untold({fact.rank for fact in evidence.facts}):
        yield Fact(rank, Fate(fates.UNSEEN), "no file of it is here", own=False)


def _call(case: Case, rank: int, ending: Ending) -> Call:
    since = case.job.ago.get(rank, LONG_S) if rank in case.job.alive else None
    return Call(
        encoder=case.name,
        title=case.call(ending),
        ending=ending,
        since_s=since,
        behind_since=behind_since(case, rank),
        reported=rank in case.stall_reports.missing,
        last=case.last_record(rank),
    )


def _fact(
    case: Case,
    rank: int,
    value: Value,
    t: float | None = None,
    of: int | None = None,
    said: str = "",
) -> Fact:
    """t: by the trace of `rank`, which is the reporter if the fact is about another rank, `of`."""
    host, at = _when(case, rank, case.job.traces[rank].last if t is None else t)
    return Fact(
        rank if of is None else of, value, _cite(rank, said), at, host, own=of is None
    )


def _when(case: Case, rank: int, t: float) -> tuple[str, float]:
    """Host and time by the clock of the reference rank's host, if the two share rounds; else by its
    own host's.
    """
    header, common = case.job.traces[rank].header, case.clocks.common(rank, t)
    reference = (
        case.job.traces[case.clocks.reference].header if common is not None else header
    )
    if common is None or reference.host == header.host:
        return safe(header.host), header.started + t
    return safe(reference.host), reference.started + common


def _cite(rank: int, said: str = "") -> str:
    return f"rank {rank}'s {said or 'trace'}"


def _ends(case: Case, rank: int, ending: Ending) -> Iterator[Fact]:
    """How it ended, if it did."""
    job = case.job
    if (fate := _fate(case, rank, ending)) is not None:
        yield fate
    elif job.moving:
        yield _fact(case, rank, Fate(fates.RUNS))
    if rank in job.alive:
        yield _fact(case, rank, Fate(fates.RUNS))


def _fate(case: Case, rank: int, ending: Ending) -> Fact | None:
    """How it ended; None where its trace has no end."""
    process, end = ending.process, case.job.traces[rank].end
    code = (
        None if end is None else end.exit_code or 0
    )  # not every exit code is known to the interpreter
    if ending.at_fault and (raised := _exception(case, rank)) is not None:
        t, error = raised
        frames = " < ".join(
            shown(function, file, line) for file, line, function in error.frames[:3]
        )
        lines = tuple(
            safe(line) for line in error.traceback.strip().splitlines()[-_MOST_DETAILS:]
        )
        return _fact(
            case, rank, Fate(fates.RAISED, error.line, safe(frames), lines, code), t
        )
    if process.waited or (ending.sync_ended and process.unknown):
        text = process.error or f"{fates.SYNC_ENDED}: another rank had gone"
        text = f"{fates.AT_START}: {text}" if process.starting else text
        return _fact(
            case,
            rank,
            Fate(fates.WAITED if process.timed_out else fates.CUT, text),
            process.at,
        )
    if process.terminated:
        return _fact(case, rank, Fate(fates.TERMINATED, process.error), process.at)
    if end is not None or process.ordinary:
        text = _after(case, ending) + (f", exit code {code}" if code else "")
        return _fact(
            case, rank, Fate(fates.ENDED, text, exit_code=code), end.t if end else None
        )
    return None


def _exception(case: Case, rank: int) -> tuple[float, Error] | None:
    """When and by which exception a rank ended, if no other rank is the reason."""
    trace, ending = case.job.traces[rank], case.endings[rank]
    track = case.tracks.get(rank)
    for raised in reversed(trace.raised):
        if (
            ending.raised
            and track is not None
            and (raised.e, raised.n) == (track.name, ending.call)
        ):
            return raised.t, error_of(raised)
    if not ending.process.own_error:
        return None
    if (failed := ending_failure(trace)) is not None:
        return failed.t, error_of(failed)
    return trace.last, error_in(ending.process.own_error)


def _after(case: Case, ending: Ending) -> str:
    if ending.inside:
        return f"in {case.call(ending)}, {ending.phase}"
    return (
        f"after {case.call(ending)}" if ending.call else "before its first encoder call"
    )


def _stall(case: Case, evidence: Evidence) -> Iterator[Fact]:
    """The latest reports on the stall that the traces end in."""
    reports = case.stall_reports
    evidence.saw_a_wait |= reports.saw_a_wait
    for rank in sorted(reports.texts):
        at = case.job.traces[rank].stalled[-1].t
        still_s = at - last_entered(case.job, rank)
        yield _fact(case, rank, Motion(False, reports.texts[rank][:600], still_s), at)
    places = {
        rank: place
        for text in reports.texts.values()
        for rank, place in places_in(text).items()
    }
    for rank, told in sorted(reports.missing.items()):
        if all(one.is_past for one in told):
            evidence.perhaps_missing.add(rank)
        where = next((one.where for one in told if one.where), "")
        fate = fates.GONE if where == PROCESS_GONE else _KINDS.get(told[0].kind)
        place = _as_in(places, rank, Place(where))
        yield _fact(
            case,
            told[0].by,
            place if fate is None else Fate(fate),
            told[0].t,
            of=rank,
            said="stall report",
        )
    for rank, told in sorted(reports.waiting.items()):
        place = _as_in(places, rank, Place(told[0].where, told[0].collective))
        yield _fact(case, told[0].by, place, of=rank, said="stall report")
    for by in sorted(reports.texts) if reports.saw_a_wait else ():
        if by not in reports.missing and by not in reports.waiting:
            place = places.get(by, Place())
            place = place if place.collective else Place("", "a collective")
            yield _fact(case, by, place, of=by, said="stall report")


def _as_in(places: Mapping[int, Place], rank: int, place: Place) -> Place:
    """The place as a report's text has it, with the caller or the worker, unless that is of another
    moment.
    """
    told = places.get(rank, place)
    return (
        told
        if told.collective == place.collective and told.where in ("", place.where)
        else place
    )


def _add_seats(case: Case, evidence: Evidence) -> None:
    """The last rounds of the length sync, if some rank has waited long in the latest one, or has
    given it up.

    Rounds pair by number. Ranks at different calls do not show a wait, nor does a round that has
    just begun.
    """
    group = f"length sync of {case.name}"
    known, reports = case.sure, case.stall_reports
    latest = max((ending.came_to for ending in known.values()), default=0)
    if not any(
        ending.came_to == latest and _has_waited(ending, reports)
        for ending in known.values()
    ):
        return
    members = evidence.groups.setdefault(group, set())
    if len(known) < case.job.world_size:
        evidence.partly_known.add(group)
    for rank, ending in sorted(known.items()):
        if not (ending.round or ending.phase == ids.LENGTH_SYNC) or ending.sync_ended:
            continue
        members.add(rank)
        for number, done in _rounds(ending):
            seat = Seat(
                rank, group, number, LENGTH_SYNC, done=done, caller=case.call(ending)
            )
            evidence.facts.append(_fact(case, rank, seat, last_entered(case.job, rank)))


def _has_waited(ending: Ending, reports: StallReports) -> bool:
    return ending.in_vain or (
        ending.phase == ids.LENGTH_SYNC and ending.rank in reports.texts
    )


def _rounds(ending: Ending) -> Iterator[tuple[int, bool]]:
    """Number, and whether the rank has left it."""
    if came := ending.round - ending.in_vain:
        yield came, True
    if ending.in_vain:
        yield ending.round, True
    if ending.phase == ids.LENGTH_SYNC:
        yield ending.round + 1, False
