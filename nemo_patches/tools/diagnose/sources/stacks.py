"""Stacks of ranks: this package's JSON of a host, and dumps made by hand.

py-spy dump (text, JSON, --native), pystack (and --native), gdb's py-bt, faulthandler in logs, and the files of
torch.distributed.debug. The rank comes from the file's name (rank3.txt, r3.log, 3.json, torchrun's 3/stderr.log), a
launcher's prefix of the lines ([rank3]:, [default3]:, [1,3]<stderr>:, 3:), a heading, or else the order of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from nemo_patches.stall.rank_kinds import CHECKPOINT, is_guess
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.collect.host_jobs import FORMAT, WHAT, HostFile, HostJob, SampledRank
from nemo_patches.tools.diagnose.collect.samples import GONE as NO_PROCESS
from nemo_patches.tools.diagnose.collect.samples import ZOMBIE, Frame, Sample, Thread, counter
from nemo_patches.tools.diagnose.facts import Evidence, Fact, Fate, Member, Motion, Place
from nemo_patches.tools.diagnose.places import is_library, place, trunk, waits_for_work
from nemo_patches.tools.diagnose.verdicts import CHILD, LOADER, LOCK

_LARGEST = 1 << 26  # bytes of a file; of a larger one its end
_LONGEST_LINE = 2000  # characters
_MOST_FRAMES, _MOST_THREADS = 300, 200
_MOST_RANK = 1 << 20
_MOST_RANKS_OF_HOST = 1 << 12
_MOST_DETAILS = 4
_HELD = dict.fromkeys("Tt", "stopped (state T)") | {"D": "in state D: a disk or a network file system"}
_BUSY_SHARE, _IDLE_SHARE = 0.5, 0.02  # of a core
_MUCH_WRITTEN = 1 << 16  # bytes between two looks; a line of a log is less
_SERVICE_THREADS = (
    *("QueueFeederThread", "pin_memory", "tqdm", "MsgRouter", "monitor", "Thread-monitor", "asyncio", "pt_"),
)

_LOG_NAMES = re.compile(r"\.(log|txt|out|err|stderr|stdout)$|^std(err|out)\b", re.IGNORECASE)
_RANK_IN_NAME = re.compile(
    r"(?:rank|worker|proc|task|\br)[-_. ]?(\d{1,7})(?!\d)|"
    r"(?:^|[-_.])(\d{1,7})(?=\.(?:txt|log|json|err|out|stack|dump)$)",
    re.IGNORECASE,
)
_NO_RANK = re.compile(r"slurm|job|node|host|gpu|run", re.IGNORECASE)  # a number of something else: slurm-4711.out
_PREFIX = re.compile(r"\s*(?:\[(?:rank|default)?(\d{1,7})\]:?|\[\d+,(\d{1,7})\]<std\w+>:?|(\d{1,7}):) ?")
_HEADING = re.compile(r"=+ ?Rank (\d{1,7})\b")  # of torch.distributed.debug: === Rank 3: host:port ===
_MARK = re.compile(
    rb"Process \d{1,10}: |Thread (?:0x)?[0-9a-fA-F]{1,16} \((?:active|idle)|most recent call first\)|"
    rb"Traceback for thread \d|=== Rank \d"
)
_JSON_MARK = re.compile(rb'"what": ?"stacks"|"owns_gil"')
_NEW_PROCESS = re.compile(r"Process (\d+): ")
_GDB_THREAD = re.compile(r"Thread (\d+) \(Thread 0x[0-9a-f]+ \(LWP (\d+)\)")
_HEADS = ("Process", "hread", "Traceback")


def recognises(name: str, head: bytes) -> bool:
    """Whether a file has stacks, or, as a log, may have some further on."""
    if head.lstrip()[:1] in (b"{", b"[") and _JSON_MARK.search(head):
        return True
    return bool(_MARK.search(head)) or (bool(_LOG_NAMES.search(name)) and b"\0" not in head)


def read(files: Sequence[Path], evidence: Evidence) -> None:
    host_files, dumps = list[tuple[str, HostFile]](), list[_Dump]()
    for file in files:
        name = _name(file)
        try:
            content = _content(file)
            if (host_file := _as_host_file(content)) is not None:
                host_files.append((name, host_file))
            else:
                dumps += _dumps(content, name)
        except OSError as error:
            evidence.problems.append(f"{safe(name)}: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            evidence.problems.append(f"{safe(name)}: its stacks cannot be read ({safe(str(error), 100)})")
    facts = _of_host_files(host_files, evidence)
    facts += _of_dumps(dumps, evidence)
    evidence.facts += facts
    sizes = [fact.value.world_size for fact in facts if isinstance(fact.value, Member)]
    evidence.world_size = max(evidence.world_size, *sizes, 0)
    evidence.moving |= any(isinstance(fact.value, Motion) and fact.value.moved for fact in facts)


# A host's samples.


def _as_host_file(content: bytes) -> HostFile | None:
    """None for another kind of file. Raises ValueError for one that is damaged, or of another format."""
    if not content.lstrip().startswith(b"{") or not re.search(rb'"what": ?"stacks"', content[:200]):
        return None
    told = msgspec.json.decode(content, type=_Header)
    if told.what != WHAT or told.format != FORMAT:
        raise ValueError(f"format {told.format}; this version of nemo_patches reads {FORMAT}")
    return msgspec.json.decode(content, type=HostFile)


class _Header(msgspec.Struct):
    what: str
    format: int


def _of_host_files(files: Sequence[tuple[str, HostFile]], evidence: Evidence) -> list[Fact]:
    """The facts of the job with the most ranks here: two jobs' ranks have the same numbers."""
    by_job: dict[str, list[tuple[str, HostJob]]] = {}
    for name, file in files:
        for job in file.jobs:
            by_job.setdefault(job.name, []).append((name, job))
    if not by_job:
        return []
    ordered = sorted(by_job.values(), key=lambda jobs: -sum(len(job.ranks) for _, job in jobs))
    if len(ordered) > 1:
        names = ", ".join(safe(jobs[0][1].name or "without a name", 100) for jobs in ordered[:4])
        evidence.problems.append(
            f"stacks of {len(ordered)} jobs ({names}): read is the first; `nemo-patches stacks --job DIR` takes one"
        )
    return [fact for _, job in ordered[0] for fact in of_samples(job)]


def of_samples(job: HostJob) -> list[Fact]:
    facts = [fact for one in job.ranks if 0 <= one.rank.rank <= _MOST_RANK for fact in _of_rank(one, job)]
    here, host = {one.rank.rank for one in job.ranks}, safe(job.host, 100)
    gone = Fate(fates.GONE, f"no process of it runs on {host}")
    return facts + [Fact(rank, gone, host, job.at, job.host) for rank in _ranks_of_host(job) if rank not in here]


def _ranks_of_host(job: HostJob) -> range:
    """The ranks that its launcher has started there, an unbroken run; empty if the variables do not say."""
    sizes = {(one.rank.local_world_size, one.rank.world_size) for one in job.ranks}
    if len(sizes) != 1:
        return range(0)
    [(local_size, world_size)] = sizes
    hosts = {one.rank.rank // local_size for one in job.ranks} if 0 < local_size <= _MOST_RANKS_OF_HOST else set()
    if len(hosts) != 1:
        return range(0)
    first = hosts.pop() * local_size
    return range(first, min(first + local_size, world_size, _MOST_RANK))


def _of_rank(sampled: SampledRank, job: HostJob) -> list[Fact]:
    rank, samples = sampled.rank, sampled.samples
    values: list[Fate | Place | Motion | Member] = [Member(rank.world_size, rank.pid)]
    if samples:
        last, motion = samples[-1], _motion(samples)
        values.append(_fate(samples))
        if last.main is not None:
            values.append(_place(samples, motion))
        if motion is not None:
            values.append(motion)
    cite = f"{safe(job.host, 100)}, pid {rank.pid}"
    return [Fact(rank.rank, value, cite, job.at, job.host) for value in values]


def _fate(samples: Sequence[Sample]) -> Fate:
    last = samples[-1]
    if last.state in (NO_PROCESS, ZOMBIE):
        return Fate(fates.GONE, "its process has ended")
    if _is_held_by_tracer(samples):
        return Fate(fates.TRACED, f"traced by pid {last.tracer} (gdb, strace)")
    if last.state == "T":
        return Fate(fates.STOPPED)
    if last.main is not None:
        return Fate(fates.RUNS)
    return Fate(
        fates.UNREADABLE, safe(last.error, 300), details=(f"state {last.state}, {last.cpu_s:.0f} s of CPU time",)
    )


def _is_held_by_tracer(samples: Sequence[Sample]) -> bool:
    """State t in all samples. strace is a tracer as well, but hardly stops its process."""
    return all(sample.tracer and sample.state == "t" for sample in samples)


def _place(samples: Sequence[Sample], motion: Motion | None) -> Place:
    """The place of the last sample, with what explains it: the lock, the loader's worker, the file."""
    last = samples[-1]
    main = last.main or Thread()
    is_in_futex = last.wait_channel.startswith("futex")
    found = place(main.frames, main.calls, is_in_futex, last.has_gpu)
    if found.activity == LOCK and not found.collective:
        found = _in_collective_of_thread(found, last)
    found = replace(found, counters=dict(main.counters), loops=dict(main.loops))
    details, worker = _holds(samples, found, motion), ""
    if found.activity == LOADER:
        worker, more = _workers(last)
        details += more
    elif not found.collective and (of_children := _children(last)):
        found = replace(found, activity=CHILD if found.activity in ("", LOCK) else found.activity)
        details += of_children
    elif not found.collective or found.activity == LOCK:
        details += _other_threads(last)
    share = _share_of_core(samples)
    runs = all(sample.state == "R" for sample in samples)  # on a busy machine its share may be small
    if not found.collective and share is not None and share > (_IDLE_SHARE if runs else _BUSY_SHARE):
        details.append(f"it computes ({100 * share:.0f} % of a core)")
    return replace(found, worker=worker, details=tuple(details[:_MOST_DETAILS]))


def _holds(samples: Sequence[Sample], found: Place, motion: Motion | None) -> list[str]:
    """What holds it up there, by the kernel and by Python's lock."""
    last, details = samples[-1], list[str]()
    stays, share = motion is not None and not motion.moved, _share_of_core(samples)
    if stays and last.state not in "Tt" and (keeper := _keeps_gil(samples)) is not None and (share or 0) < _IDLE_SHARE:
        who = "it" if keeper.tid == last.pid else f"its thread {safe(keeper.name or str(keeper.tid), 60)!r}"
        details.append(f"{who} holds Python's lock (GIL) in a C call")
    if last.file and not found.collective:
        details.append(f"its system call is at {safe(last.file, 200)}")
    if last.tracer and not _is_held_by_tracer(samples):
        details.append(f"pid {last.tracer} traces it (strace, gdb)")
    if last.state == "D":
        channel = f" ({safe(last.wait_channel, 60)})" if last.wait_channel.strip("0") else ""
        details.append(f"in an uninterruptible system call{channel}: a disk or a network file system")
    return details


def _in_collective_of_thread(found: Place, last: Sample) -> Place:
    """A rank whose main thread waits for a thread that is in a collective, is in that collective."""
    for thread in last.threads:
        if thread.tid != last.pid and _is_users(thread.name, thread.frames):
            theirs = place(thread.frames, has_gpu=last.has_gpu)
            if theirs.collective and not is_guess(theirs.collective):
                return replace(found, collective=theirs.collective, caller=theirs.caller)
    return found


def _children(last: Sample) -> list[str]:
    """Where the child processes are that a process waits for."""
    told = list[str]()
    for sample in last.workers:
        frames = sample.main.frames if sample.main is not None else ()
        if _inside_worker(frames) is not None or (frames and all(map(is_library, frames))):
            continue  # a data loader's worker, or multiprocessing's own process
        name = f"{safe(sample.name, 30)} (pid {sample.pid})"
        if sample.state in (NO_PROCESS, ZOMBIE):
            told.append(f"its child {name} has ended")
            continue
        where = f"in {place(frames).where}" if frames else ""
        at = f"at {safe(sample.file, 200)}" if sample.file else ""
        text = ", ".join(filter(None, (where, at, _HELD.get(sample.state, ""))))
        told.append(f"its child {name} {f'is {text}' if text else 'runs'}")
    return told


def _share_of_core(samples: Sequence[Sample]) -> float | None:
    """The main thread's share of a core between the samples."""
    passed_s = samples[-1].uptime_s - samples[0].uptime_s
    return (samples[-1].cpu_s - samples[0].cpu_s) / passed_s if passed_s > 0 else None


def _keeps_gil(samples: Sequence[Sample]) -> Thread | None:
    """The thread that had Python's lock in all samples, at one line."""
    holders = [next((thread for thread in sample.threads if thread.has_gil), None) for sample in samples]
    known = [(holder.tid, holder.frames[:1]) for holder in holders if holder is not None]
    return holders[-1] if len(known) == len(samples) > 1 and len(set(known)) == 1 else None


def _workers(last: Sample) -> tuple[str, list[str]]:
    """Where the workers are of a rank that waits for its data loader: the first one's text, and the others'."""
    pids_by_text: dict[str, list[int]] = {}
    died = [sample.pid for sample in last.workers if sample.state in (NO_PROCESS, ZOMBIE)]
    for sample in last.workers:
        frames = sample.main.frames if sample.main is not None else ()
        inside = _inside_worker(frames)
        held = _HELD.get(sample.state, "")
        if not held and (inside is None or waits_for_work(inside)):
            continue
        at = f", at {safe(sample.file, 200)}" if sample.file else ""
        at += "".join(f"; {child}" for child in _children(sample)[:1])
        text = f"in {place(inside).where}{at}" if inside else ""
        pids_by_text.setdefault(", ".join(filter(None, (text, held))), []).append(sample.pid)
    told = [f"its worker (pid {pid}) has died" for pid in died]
    for text, pids in pids_by_text.items():
        many = f"s (pids {', '.join(map(str, pids[:4]))}) are" if len(pids) > 1 else f" (pid {pids[0]}) is"
        told.append(f"its worker{many} {text}")
    return told[0] if told else "", told[1:]


def _inside_worker(frames: Sequence[Frame]) -> tuple[Frame, ...] | None:
    """A worker's frames up to its loop: a forked worker has its parent's frames, too. None if it is no worker."""
    for number, frame in enumerate(frames):
        if frame.name.rpartition(".")[2] == "_worker_loop":
            return tuple(frames[: number + 1])
    return None


def _other_threads(last: Sample) -> list[str]:
    """Its threads that stand in the user's code."""
    return [
        f"its thread {safe(thread.name or str(thread.tid), 60)!r} is in {place(thread.frames).where}"
        for thread in last.threads
        if thread.tid != last.pid and _is_users(thread.name, thread.frames)
    ]


def _is_users(name: str, frames: Sequence[Frame]) -> bool:
    return not name.startswith(_SERVICE_THREADS) and any(not is_library(frame) for frame in frames)


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
    if by := _went_on(first.main, last.main):
        return Motion(True, by)
    wrote = last.written - first.written
    if wrote >= _MUCH_WRITTEN and place(last.main.frames).activity == CHECKPOINT:
        return Motion(True, f"it wrote {wrote / 1e6:.1f} MB")
    ran = _ran(samples)
    if ran and any(sample.waits_untimed for sample in samples):
        return Motion(True, "what it waited for has come, and it waits again")
    is_idle = (_share_of_core(samples) or 0.0) < _BUSY_SHARE
    in_loader = any("utils/data/" in frame.file for frame in first.main.frames)  # it polls its workers
    if ran and is_idle and first.main.frames[:1] != last.main.frames[:1] and not in_loader:
        return Motion(True, "it has run meanwhile")
    between = last.uptime_s - first.uptime_s
    still_s = between if ran else between + (first.slept_s or 0.0)
    return Motion(False, still_s=max(still_s, _workers_slept_s(first, last, between)))


def _motion_by_kernel(first: Sample, last: Sample) -> Motion | None:
    """Without stacks only that it has not run can be known."""
    between = last.uptime_s - first.uptime_s
    has_run = last.cpu_s > first.cpu_s or last.switches > first.switches
    return None if has_run or first.slept_s is None else Motion(False, still_s=between + first.slept_s)


def _went_on(before: Thread | _Stack, now: Thread | _Stack) -> str:
    for name in sorted(before.counters.keys() & now.counters.keys()):
        if before.counters[name] != now.counters[name]:
            return f"{safe(name, 100)} went from {before.counters[name]} to {now.counters[name]}"
    return "another place" if trunk(before.frames) != trunk(now.frames) else ""


def _ran(samples: Sequence[Sample]) -> bool:
    """Whether the main thread has run by itself: a look wakes it as well, but only for an instant."""
    woke = any(
        sample.slept_s is not None and sample.undisturbed_s is not None and sample.slept_s + 0.5 < sample.undisturbed_s
        for sample in samples[1:]
    )
    first, last = samples[0], samples[-1]
    has_used = last.cpu_s - first.cpu_s >= 0.02 and last.switches - first.switches >= 3
    return has_used and (woke or any(sample.state == "R" for sample in samples))


def _workers_slept_s(first: Sample, last: Sample, between_s: float) -> float:
    """How long its workers have slept: a rank that waits for its data loader itself wakes every few seconds."""
    slept = [sample.slept_s for sample in first.workers if sample.slept_s is not None]
    return min(slept) + between_s if slept and first.workers and last.workers else 0.0


# Dumps made by hand.


@dataclass(frozen=True)
class _Form:
    """How a tool prints stacks: the line that begins a thread, and the line of a frame, each with named groups.

    has_gil: words in a thread's state. innermost_last: the order of frames. main_last: the order of threads.
    """

    thread: re.Pattern[str]
    frame: re.Pattern[str]
    has_gil: str = ""
    innermost_last: bool = False
    main_last: bool = False

    def frame_in(self, line: str) -> Frame | None:
        if (found := self.frame.match(line)) is None:
            return None
        told = found.groupdict()
        file = f"{told['library'] or ''}.so" if told.get("language") == "C" else told["file"]
        number = told["line"] or ""
        return Frame(told["name"], file, int(number) if number.isdecimal() else 0)


_PY_SPY = _Form(
    re.compile(r'Thread (?:0x)?(?P<tid>[0-9a-fA-F]+) \((?P<state>[^)]*)\)(?:: "(?P<name>[^"]*)")?\s*$'),
    re.compile(r"    (?P<name>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)\s*$"),
    has_gil="gil",
)
_FAULTHANDLER = _Form(
    re.compile(r"(?:Current thread|Thread) (?P<tid>0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"),
    re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+?)\s*$'),
    main_last=True,
)
_PYSTACK = _Form(
    re.compile(r"Traceback for thread (?P<tid>\d+)(?: \((?P<name>[^)]*)\))?(?P<state>.*)\(most recent call last\):"),
    re.compile(
        r'\s+\((?P<language>Python|C)\) File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>.+?)'
        r"(?: \((?P<library>[^)]*)\))?\s*$"
    ),
    has_gil="Has the GIL",
    innermost_last=True,
)
_GDB = _Form(
    re.compile(r"Traceback \(most recent call first\):"),
    re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)'),
)
_FORMS = (_FAULTHANDLER, _PY_SPY, _PYSTACK, _GDB)


@dataclass
class _Stack:
    """One thread of a dump."""

    form: _Form
    tid: str
    name: str = ""
    has_gil: bool = False
    frames: list[Frame] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class _Dump:
    """One dump of one process. rank: None if not known."""

    rank: int | None
    pid: int
    cite: str
    stacks: list[_Stack] = field(default_factory=list)

    @property
    def main(self) -> _Stack:
        whole = [stack for stack in self.stacks if stack.frames] or self.stacks
        named = (stack for stack in whole if "MainThread" in stack.name or stack.tid == str(self.pid))
        return next(named, whole[-1] if whole[0].form.main_last else whole[0])


def _name(file: Path) -> str:
    """Its citation: with the folder for torchrun's logs, which have the same name in each folder."""
    return f"{file.parent.name}/{file.name}" if re.match(r"std(err|out)\b", file.name) else file.name


def _rank_in_name(name: str) -> int | None:
    folder, _, base = name.rpartition("/")
    found = _RANK_IN_NAME.search(base)
    if found and (found[1] or not _NO_RANK.search(base[: found.start()])):
        return int(found[1] or found[2])
    return int(folder) if folder.isdecimal() and int(folder) <= _MOST_RANK else None


def _content(file: Path) -> bytes:
    with open(file, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _LARGEST))
        return opened.read(_LARGEST)


def _dumps(content: bytes, name: str) -> list[_Dump]:
    if content.lstrip().startswith(b"["):
        found = _of_json(content, name)
        if found is not None:
            return [found]
    if not _MARK.search(content):
        return []
    return list(_of_text(content.decode(errors="replace"), name))


class _SpyLocal(msgspec.Struct):
    name: str
    repr: str | None = None


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0
    locals: list[_SpyLocal] | None = None


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    owns_gil: bool
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None


def _of_json(content: bytes, name: str) -> _Dump | None:
    """py-spy's JSON; None if it is another tool's."""
    try:
        threads = msgspec.json.decode(content, type=list[_SpyThread])
    except msgspec.DecodeError:
        if b'"owns_gil"' in content[: 1 << 16]:
            raise
        return None
    dump = _Dump(_rank_in_name(name), threads[0].pid if threads else 0, safe(name, 200))
    for thread in threads[:_MOST_THREADS]:
        frames = [Frame(frame.name, frame.filename, frame.line) for frame in thread.frames[:_MOST_FRAMES]]
        stack = _Stack(_PY_SPY, str(thread.os_thread_id), thread.thread_name or "", thread.owns_gil, frames)
        for frame in reversed(thread.frames[:_MOST_FRAMES]):
            for variable in frame.locals or ():
                stack.counters |= counter(frame.name, frame.filename, variable.name, variable.repr or "")
        dump.stacks.append(stack)
    return dump if dump.stacks else None


def _of_text(text: str, name: str) -> Iterator[_Dump]:
    """All dumps of a file, in its order; lines of several ranks may be mixed, each with its prefix."""
    named, heading = _rank_in_name(name), None
    writers: dict[int | None, _Writer] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            continue
        if found := _HEADING.match(line):
            heading = int(found[1])
            writers.pop(heading, None)
            continue
        prefix = _PREFIX.match(line)
        rank = int(prefix[1] or prefix[2] or prefix[3]) if prefix else heading if heading is not None else named
        writer = writers.setdefault(rank, _Writer(rank))
        if (dump := writer.take(line[prefix.end() :] if prefix else line)) is not None:
            dump.cite = f"{safe(name, 200)}:{number}"
            yield dump


class _Writer:
    """What one process has written, line by line."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.pid = 0
        self.dump: _Dump | None = None
        self.stack: _Stack | None = None
        self.tid = ""  # from gdb's heading, for the stack that comes next

    def take(self, line: str) -> _Dump | None:
        """The dump that begins with this line, if one does."""
        if not line or line[0].isspace():
            stack = self.stack
            if stack is not None and len(stack.frames) < _MOST_FRAMES and (frame := stack.form.frame_in(line)):
                stack.frames.insert(0 if stack.form.innermost_last else len(stack.frames), frame)
            return None
        if not any(word in line for word in _HEADS):
            self.stack = None  # after a dump, a traceback has lines as faulthandler's
            return None
        if found := _NEW_PROCESS.match(line):
            self.pid, self.dump, self.stack = int(found[1]), None, None
            return None
        if found := _GDB_THREAD.match(line):
            self.tid, self.stack = found[2], None
            return None
        self.stack = stack = self._begins(line)
        if stack is None:
            return None
        is_new = self.dump is None or self.dump.stacks[-1].form != stack.form
        if is_new or self.dump is None or any(other.tid == stack.tid for other in self.dump.stacks):
            self.dump = _Dump(self.rank, self.pid, "", [stack])
            return self.dump
        if len(self.dump.stacks) < _MOST_THREADS:
            self.dump.stacks.append(stack)
        return None

    def _begins(self, line: str) -> _Stack | None:
        for form in _FORMS:
            if found := form.thread.match(line):
                told = found.groupdict("")
                if "tid" not in told:  # gdb's is in a line before
                    told["tid"], self.tid = self.tid, ""
                has_gil = bool(form.has_gil) and form.has_gil in told["state"]
                return _Stack(form, told["tid"], told.get("name", ""), has_gil)
        return None


def _of_dumps(dumps: Iterable[_Dump], evidence: Evidence) -> list[Fact]:
    """The facts of each rank's last dump, and whether it moved since the first one of the same process."""
    by_rank: dict[int, list[_Dump]] = {}
    unnamed = list[_Dump]()
    for dump in dumps:
        if dump.rank is None:
            unnamed.append(dump)
        elif dump.rank <= _MOST_RANK:
            by_rank.setdefault(dump.rank, []).append(dump)
    if unnamed and by_rank:
        evidence.problems.append(
            f"{unnamed[0].cite}: no rank is told for the stack there; others are, so it is left out"
        )
    elif unnamed:
        evidence.problems.append("no file name or line tells a rank: they are numbered in the order of the files")
        by_process: dict[tuple[str, int], list[_Dump]] = {}
        for dump in unnamed:
            by_process.setdefault((dump.cite.partition(":")[0], dump.pid), []).append(dump)
        by_rank = dict(enumerate(by_process.values()))
    return [fact for rank, of_rank in sorted(by_rank.items()) for fact in _of_dumped(rank, of_rank)]


def _of_dumped(rank: int, dumps: Sequence[_Dump]) -> Iterator[Fact]:
    last = dumps[-1]
    main = last.main
    if not any(stack.frames for stack in last.stacks):
        return
    found = place(main.frames)
    details = list[str]()
    if main.has_gil and not found.collective:
        details.append("it holds Python's lock (GIL)")
    if not found.collective:
        details += [
            f"its thread {safe(stack.name, 60)!r} is in {place(stack.frames).where}"
            for stack in last.stacks
            if stack is not main and _is_users(stack.name, stack.frames)
        ]
    if last.pid:
        yield Fact(rank, Member(pid=last.pid), last.cite)
    if main.form != _FAULTHANDLER:  # faulthandler writes when a process ends, too
        yield Fact(rank, Fate(fates.RUNS), last.cite)
    yield Fact(rank, replace(found, details=tuple(details[:_MOST_DETAILS])), last.cite)
    before = next((dump for dump in dumps[:-1] if dump.pid == last.pid and dump.main.form == main.form), None)
    if before is not None:
        by = _went_on(before.main, main)
        yield Fact(rank, Motion(bool(by), by), last.cite)
