"""Stacks of ranks, as this package's JSON of a host has them.

dumps.py reads those that were made by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from nemo_patches.judging.kinds import CHECKPOINT, is_guess
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.collect.host_jobs import (
    FORMAT,
    HostFile,
    HostJob,
    SampledRank,
)
from nemo_patches.tools.diagnose.collect.samples import GONE as NO_PROCESS
from nemo_patches.tools.diagnose.collect.samples import (
    MOST_CHILDREN,
    ZOMBIE,
    Frame,
    Sample,
    Thread,
)
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources import dumps
from nemo_patches.tools.diagnose.sources.dumps import MOST_DETAILS, Dump
from nemo_patches.tools.diagnose.thread_places import (
    is_users,
    place,
    waits_for_work,
    went_on,
)
from nemo_patches.tools.diagnose.verdicts import CHILD, LOADER, LOCK

NOTES = "stacks in notes"
KIND = "stacks"
_LARGEST = 1 << 26  # bytes of a file; of a larger one its end
_MOST_RANK = 1 << 20
_MOST_RANKS_OF_HOST = 1 << 12
# What the kernel waits for in state D, by the function that it is in.
_KERNEL_WAITS = (
    (
        "mem_cgroup",
        "its cgroup is out of memory, and the kernel holds it until some is free",
    ),
    ("oom", "the host is out of memory"),
    ("freez", "its cgroup is frozen (cgroup.freeze)"),
    ("refrigerator", "its cgroup is frozen (cgroup.freeze)"),
)
_BUSY_SHARE, _IDLE_SHARE = 0.5, 0.02  # of a core
_MUCH_WRITTEN = 1 << 16  # bytes between two looks; a line of a log is less
_LOG_NAMES = re.compile(
    r"\.(log|txt|out|err|stderr|stdout)$|^std(err|out)\b", re.IGNORECASE
)
_HOST_FILE = re.compile(rb'\s*\{[^{}]{0,200}"what": ?"stacks"')
_JSON_MARK = re.compile(rb'"what": ?"stacks"|"owns_gil"')


def recognises(name: str, head: bytes) -> bool:
    """Whether a file has stacks, or, as a log, may have some further on."""
    if head.lstrip()[:1] in (b"{", b"[") and _JSON_MARK.search(head):
        return True
    return dumps.tells(head) or (bool(_LOG_NAMES.search(name)) and b"\0" not in head)


def read_notes(files: Sequence[Path], evidence: Evidence) -> None:
    """Of prose, in which stacks may be examples: those of processes that logs know."""
    told = Evidence(rank_of_pid=evidence.rank_of_pid)
    read(files, told)
    known = {
        fact.rank
        for fact in told.facts
        if isinstance(fact.value, ProcessRank)
        and evidence.rank_of_pid.get(fact.value.pid) == fact.rank
    }
    evidence.facts += [fact for fact in told.facts if fact.rank in known]


def read(files: Sequence[Path], evidence: Evidence) -> None:
    host_files, found = list[HostFile](), list[Dump]()
    for file in files:
        name = _name(file)
        try:
            content = _content(file)
            if (host_file := _as_host_file(content)) is not None:
                host_files.append(host_file)
            else:
                found += dumps.dumps_in(content, name)
        except OSError as error:
            evidence.problems.append(f"{safe(name)}: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            evidence.problems.append(
                f"{safe(name)}: its stacks cannot be read ({safe(str(error), 100)})"
            )
    facts = _of_host_files(host_files, evidence)
    facts += dumps.facts_of(found, evidence)
    evidence.facts += facts
    sizes = [
        fact.value.world_size for fact in facts if isinstance(fact.value, ProcessRank)
    ]
    evidence.world_size = max(evidence.world_size, *sizes, 0)


# A host's samples.


def _as_host_file(content: bytes) -> HostFile | None:
    """None for another kind of file. Raises ValueError for one that is damaged, or of another
    format.
    """
    if not _HOST_FILE.match(content):
        return None
    told = msgspec.json.decode(content, type=_Header)
    if told.format != FORMAT:
        raise ValueError(
            f"format {told.format}; this version of nemo_patches reads {FORMAT}"
        )
    return msgspec.json.decode(content, type=HostFile)


class _Header(msgspec.Struct):
    format: int


def _of_host_files(files: Sequence[HostFile], evidence: Evidence) -> list[Fact]:
    """The facts of the job with the most ranks here; those of other jobs go to
    evidence.other_jobs.
    """
    by_job: dict[str, list[Fact]] = {}
    for job in (job for file in files for job in file.jobs):
        name = safe(job.name or "without a name", 100)
        by_job.setdefault(name, []).extend(of_samples(job))
    by_size = sorted(by_job, key=lambda name: -len({f.rank for f in by_job[name]}))
    if len(by_size) > 1:
        evidence.problems.append(
            f"stacks of {len(by_size)} jobs ({', '.join(by_size[:4])}): each is judged,"
            " the first with all else that lies there"
        )
    evidence.other_jobs |= {name: by_job[name] for name in by_size[1:]}
    return by_job[by_size[0]] if by_size else []


def of_samples(job: HostJob) -> list[Fact]:
    facts = [
        fact
        for one in job.ranks
        if 0 <= one.rank.rank <= _MOST_RANK
        for fact in _of_rank(one, job)
    ]
    here, host = {one.rank.rank for one in job.ranks}, safe(job.host, 100)
    gone = Condition(conditions.GONE, f"no process of it runs on {host}")
    return facts + [
        Fact(rank, gone, host, job.at, job.host)
        for rank in _ranks_of_host(job)
        if rank not in here
    ]


def _ranks_of_host(job: HostJob) -> range:
    """The ranks that its launcher has started there, an unbroken run; empty if the variables do not
    say.
    """
    sizes = {(one.rank.local_world_size, one.rank.world_size) for one in job.ranks}
    local_size, world_size = min(sizes, default=(0, 0))
    hosts = {one.rank.rank // max(local_size, 1) for one in job.ranks}
    is_known = len(sizes) == len(hosts) == 1
    if not is_known or not 0 < local_size <= _MOST_RANKS_OF_HOST:
        return range(0)
    first = hosts.pop() * local_size
    return range(first, min(first + local_size, world_size, _MOST_RANK))


def _of_rank(sampled: SampledRank, job: HostJob) -> list[Fact]:
    rank, samples = sampled.rank, sampled.samples
    values: list[Condition | Place | Motion | ProcessRank] = [
        ProcessRank(rank.world_size, rank.pid, job.in_container)
    ]
    if samples:
        last, motion = samples[-1], _motion(samples)
        values.append(_condition(samples))
        if last.main is not None:
            values.append(_place(samples, motion))
            values += dumps.threads_in_collectives(_training(last), last.threads)
        if motion is not None:
            values.append(motion)
    cite = f"{safe(job.host, 100)}, pid {rank.pid}"
    return [Fact(rank.rank, value, cite, job.at, job.host) for value in values]


def _condition(samples: Sequence[Sample]) -> Condition:
    last = samples[-1]
    if last.state in (NO_PROCESS, ZOMBIE):
        return Condition(conditions.GONE, "its process has ended")
    if _is_held_by_tracer(samples):
        return Condition(
            conditions.TRACED, f"traced by pid {last.tracer} (gdb, strace)"
        )
    if last.state == "T":
        return Condition(conditions.STOPPED)
    if last.main is not None:
        return Condition(conditions.RUNS)
    return Condition(
        conditions.UNREADABLE,
        safe(last.error, 300),
        details=(f"state {last.state}, {last.cpu_s:.0f} s of CPU time",),
    )


def _is_held_by_tracer(samples: Sequence[Sample]) -> bool:
    """State t in all samples. strace is a tracer as well, but hardly stops its process."""
    return all(sample.tracer and sample.state == "t" for sample in samples)


def _place(samples: Sequence[Sample], motion: Motion | None) -> Place:
    """The place of the last sample, with what explains it: the lock, the loader's worker, the
    file.
    """
    last = samples[-1]
    main = _training(last)
    is_in_futex = last.wait_channel.startswith("futex")
    found = place(main.frames, main.calls, is_in_futex, last.has_gpu)
    if found.activity == LOCK and not found.collective:
        found = _in_collective_of_thread(found, last)
    found = replace(found, counters=dict(main.counters), loops=dict(main.loops))
    details, worker = _holds(samples, found, motion), ""
    if found.activity == LOADER:
        worker, more = _workers(samples)
        details += more
    elif not found.collective and (of_children := _children(samples)):
        found = replace(
            found, activity=CHILD if found.activity in ("", LOCK) else found.activity
        )
        details += of_children
    elif not found.collective or found.activity == LOCK:
        details += _other_threads(last)
    if not found.collective and _computes(samples):
        details.append(
            f"it computes ({100 * (_share_of_core(samples) or 0.0):.0f} % of a core)"
        )
    return replace(found, worker=worker, details=tuple(details[:MOST_DETAILS]))


def _training(sample: Sample) -> Thread:
    others = [one for one in sample.threads if one.tid != sample.pid]
    return dumps.training(sample.main or Thread(), others)


def _holds(samples: Sequence[Sample], found: Place, motion: Motion | None) -> list[str]:
    """What holds it up there, by the kernel and by Python's lock."""
    last, details = samples[-1], list[str]()
    stays, share = motion is not None and not motion.moved, _share_of_core(samples)
    if (
        stays
        and last.state not in "Tt"
        and (keeper := _keeps_gil(samples)) is not None
        and (share or 0) < _IDLE_SHARE
    ):
        who = "it" if keeper.tid == last.pid else dumps.thread_title(keeper)
        details.append(f"{who} holds Python's lock (GIL) in a C call")
    if last.file and not found.collective:
        details.append(f"its system call is at {safe(last.file, 200)}")
    if last.tracer and not _is_held_by_tracer(samples):
        details.append(f"pid {last.tracer} traces it (strace, gdb)")
    if held := _held(last):
        details.append(held)
    return details


def _held(sample: Sample) -> str:
    """What holds a process in state T or D; empty in other states."""
    if sample.state in ("T", "t"):
        return "stopped (state T)"
    channel = sample.wait_channel
    why = next((why for words, why in _KERNEL_WAITS if words in channel), "")
    if sample.state != "D" and not why:  # cgroup 2 freezes processes in state S
        return ""
    state = (
        "state D, an uninterruptible system call"
        if sample.state == "D"
        else f"state {safe(sample.state, 1)}"
    )
    at = f" ({safe(channel, 60)})" if channel.strip("0") else ""
    return f"in {state}{at}: {why or 'a disk or a network file system'}"


def _in_collective_of_thread(found: Place, last: Sample) -> Place:
    """A rank whose main thread waits for a thread that is in a collective, is in that
    collective.
    """
    for thread in last.threads:
        if thread.tid != last.pid and is_users(thread.name, thread.frames):
            theirs = place(thread.frames, has_gpu=last.has_gpu)
            if theirs.collective and not is_guess(theirs.collective):
                return replace(
                    found, collective=theirs.collective, caller=theirs.caller
                )
    return found


def _children(samples: Sequence[Sample]) -> list[str]:
    """Where the child processes are that a process waits for."""
    last, told = samples[-1], list[str]()
    if _has_idle_pool(samples):
        return [
            "its multiprocessing.Pool has nothing to do: the child that had the task"
            " was killed, most likely"
        ]
    for sample in last.workers:
        frames = _own_frames(sample)
        if frames and (
            dumps.is_loaders(frames) or all(map(_is_multiprocessings, frames))
        ):
            continue
        name = f"{safe(sample.name, 30)} (pid {sample.pid})"
        if sample.state in (NO_PROCESS, ZOMBIE):
            told.append(f"its child {name} has ended")
            continue
        text = _doing(sample, frames, samples[0])
        told.append(f"its child {name} {f'is {text}' if text else 'runs'}")
    return told


def _is_multiprocessings(frame: Frame) -> bool:
    return frame.file.startswith("<") or "multiprocessing/" in frame.file


def _has_idle_pool(samples: Sequence[Sample]) -> bool:
    """Whether it waits for a result of multiprocessing.Pool while all children of that wait for a
    task, at both looks.

    A Pool starts another child for one that was killed, whose task is lost. Not where a thread of
    the rank is in the user's code, which may make the next task, nor where not every child was
    looked at.
    """
    return len(samples) > 1 and all(map(_is_idle_in_pool, samples))


def _is_idle_in_pool(sample: Sample) -> bool:
    of_children = [_own_frames(each) for each in sample.workers]
    if not _is_pools(sample.frames) or _other_threads(sample):
        return False
    if not all(of_children) or len(of_children) >= MOST_CHILDREN:
        return False
    of_pool = [frames for frames in of_children if _is_pools(frames)]
    return bool(of_pool) and all(map(_waits_for_a_task, of_pool))


def _is_pools(frames: Sequence[Frame]) -> bool:
    return any("multiprocessing/pool.py" in frame.file for frame in frames)


def _waits_for_a_task(frames: Sequence[Frame]) -> bool:
    is_in_queue = any(
        frame.file.endswith("multiprocessing/queues.py") for frame in frames
    )
    return is_in_queue and all(map(_is_multiprocessings, frames))


def _computes(samples: Sequence[Sample]) -> bool:
    """On a busy machine the share of a thread that runs may be small."""
    share = _share_of_core(samples)
    runs = all(sample.state == "R" for sample in samples)
    return share is not None and share > (_IDLE_SHARE if runs else _BUSY_SHARE)


def _doing(child: Sample, frames: Sequence[Frame], before: Sample) -> str:
    """Where a child process was at the last look, and what it did. before: its parent's first
    look.
    """
    earlier = next((one for one in before.workers if one.pid == child.pid), None)
    told = (
        f"in {place(frames).where}" if frames else "",
        f"at {safe(child.file, 200)}" if child.file else "",
        _held(child),
        "computing" if earlier is not None and _computes((earlier, child)) else "",
    )
    return ", ".join(filter(None, told))


def _share_of_core(samples: Sequence[Sample]) -> float | None:
    """The main thread's share of a core between the samples."""
    passed_s = samples[-1].uptime_s - samples[0].uptime_s
    return (samples[-1].cpu_s - samples[0].cpu_s) / passed_s if passed_s > 0 else None


def _keeps_gil(samples: Sequence[Sample]) -> Thread | None:
    """The thread that had Python's lock in all samples, at one line."""
    holders = [one for sample in samples for one in sample.threads if one.has_gil]
    is_one = len({(one.tid, one.frames[:1]) for one in holders}) == 1
    return holders[-1] if is_one and len(holders) == len(samples) > 1 else None


def _workers(samples: Sequence[Sample]) -> tuple[str, list[str]]:
    """Where the workers are of a rank that waits for its data loader: the first one's text, and the
    others'.
    """
    last = samples[-1]
    pids_by_text: dict[str, list[int]] = {}
    died = [
        sample.pid for sample in last.workers if sample.state in (NO_PROCESS, ZOMBIE)
    ]
    for sample in last.workers:
        frames = _own_frames(sample)
        is_loaders = dumps.is_loaders(frames)
        is_idle = not is_loaders or waits_for_work(frames)
        if is_idle and not _held(sample):
            continue
        told = _doing(sample, frames if is_loaders else (), samples[0])
        told += "".join(f"; {child}" for child in _children([sample])[:1])
        pids_by_text.setdefault(told, []).append(sample.pid)
    told_of = [f"its worker (pid {pid}) has died" for pid in died]
    for text, pids in pids_by_text.items():
        many = (
            f"s (pids {', '.join(map(str, pids[:4]))}) are"
            if len(pids) > 1
            else f" (pid {pids[0]}) is"
        )
        told_of.append(f"its worker{many} {text}")
    return told_of[0] if told_of else "", told_of[1:]


def _own_frames(sample: Sample) -> Sequence[Frame]:
    return dumps.own_frames(sample.frames)


def _other_threads(last: Sample) -> list[str]:
    """Its threads that stand in the user's code."""
    return dumps.other_threads(Thread(tid=last.pid), last.threads)


# Whether it went on.


def _motion(samples: Sequence[Sample]) -> Motion | None:
    """None where there are not two samples of a process that may run."""
    first, last = samples[0], samples[-1]
    if len(samples) < 2 or last.state in (NO_PROCESS, ZOMBIE):
        return None
    if last.state == "T" or _is_held_by_tracer(samples):
        return Motion(False, still_s=last.uptime_s - first.uptime_s)
    if first.main is None or last.main is None:
        return _motion_by_kernel(first, last)
    if by := went_on(_training(first), _training(last)):
        return Motion(True, by)
    wrote = last.written - first.written
    if wrote >= _MUCH_WRITTEN and place(last.frames).activity == CHECKPOINT:
        return Motion(True, f"it wrote {wrote / 1e6:.1f} MB")
    ran = _ran(samples)
    if ran and any(sample.waits_untimed for sample in samples):
        return Motion(True, "what it waited for has come, and it waits again")
    is_idle = (_share_of_core(samples) or 0.0) < _BUSY_SHARE
    # It polls its workers.
    in_loader = any("utils/data/" in frame.file for frame in first.frames)
    if ran and is_idle and first.frames[:1] != last.frames[:1] and not in_loader:
        return Motion(True, "it has run meanwhile")
    between = last.uptime_s - first.uptime_s
    still_s = between if ran else between + (first.slept_s or 0.0)
    return Motion(False, still_s=max(still_s, _workers_slept_s(first, last, between)))


def _motion_by_kernel(first: Sample, last: Sample) -> Motion | None:
    """Without stacks only that it has not run can be known."""
    between = last.uptime_s - first.uptime_s
    has_run = last.cpu_s > first.cpu_s or last.switches > first.switches
    return (
        None
        if has_run or first.slept_s is None
        else Motion(False, still_s=between + first.slept_s)
    )


def _ran(samples: Sequence[Sample]) -> bool:
    """Whether the main thread has run by itself: a look wakes it as well, but only for an
    instant.
    """
    woke = any(
        sample.slept_s is not None
        and sample.undisturbed_s is not None
        and sample.slept_s + 0.5 < sample.undisturbed_s
        for sample in samples[1:]
    )
    first, last = samples[0], samples[-1]
    has_used = last.cpu_s - first.cpu_s >= 0.02 and last.switches - first.switches >= 3
    return has_used and (woke or any(sample.state == "R" for sample in samples))


def _workers_slept_s(first: Sample, last: Sample, between_s: float) -> float:
    """How long its workers have slept: a rank that waits for its data loader itself wakes every few
    seconds.
    """
    slept = [sample.slept_s for sample in first.workers if sample.slept_s is not None]
    return min(slept) + between_s if slept and first.workers and last.workers else 0.0


def _name(file: Path) -> str:
    """Its citation: with the folder for torchrun's logs, which have the same name in each
    folder.
    """
    return (
        f"{file.parent.name}/{file.name}"
        if re.match(r"std(err|out)\b", file.name)
        else file.name
    )


def _content(file: Path) -> bytes:
    with open(file, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _LARGEST))
        return opened.read(_LARGEST)
