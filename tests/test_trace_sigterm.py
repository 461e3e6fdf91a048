"""SIGTERM while a traced process ends, to its last instruction: it ends as it would without a trace, not by SIGSEGV.

Real processes, with torch. A function of C's own exit, as the destructors of CUDA or of a store's client are, runs when
the interpreter is gone: there a signal meets whatever has been left as its handler.
"""

from __future__ import annotations

import ast
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import traces
from test_trace_records import end, start

from nemo_patches.tools.diagnose.folder import Folder
from nemo_patches.tools.diagnose.rank_end import ProcessEnd, process_end
from nemo_patches.tools.diagnose.rank_trace import RankTrace

pytestmark = [pytest.mark.one_nemo]

HANDLER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"
BACK = "signal.signal(signal.SIGTERM, signal.SIG_DFL)"
FAULTHANDLER = "import faulthandler; faulthandler.register(signal.SIGTERM, open(os.devnull, 'w'), chain=True)"
STUCK = "from nemo_patches.tracing.part_files import PartFiles\nPartFiles.flush = lambda self: time.sleep(99)"
STOP = "tracing.stop()"
AGAIN = "tracing.start(TraceSettings(folder / 'again')); call(); recorded()"
RAISES_AT_EXIT = "import atexit; atexit.register(signal.raise_signal, signal.SIGTERM)"
FORKS = "if child := os.fork(): os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 127)"
# What comes before the trace, and after the call that it records; a stock process leaves out what is "traced".
ENDS = {
    "default": ("", ""),
    "user's handler": (HANDLER, ""),
    "handler set later": ("", HANDLER),
    "another handler set later": (HANDLER, HANDLER),
    "Lightning's teardown": (HANDLER, BACK),
    "ignored later": (HANDLER, "signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    "exception": (HANDLER, f"{BACK}\nraise ValueError('the end')"),
    "sys.exit in the handler": (HANDLER, "signal.raise_signal(signal.SIGTERM)"),
    "handler raises at exit": (HANDLER, RAISES_AT_EXIT),
    "forked child": (HANDLER, f"{FORKS}\n{BACK}"),
    "forked child with calls": (HANDLER, f"{FORKS}\ncall()\n{BACK}"),
    "stopped": (HANDLER, f"traced: {STOP}\n{BACK}"),
    "traced again": (HANDLER, f"traced: {AGAIN}\n{BACK}"),
    "the disk does not answer": (f"{HANDLER}\n{STUCK}", BACK),
    "first call at exit": (HANDLER, f"{BACK}\nimport atexit; atexit.register(call)"),
    "user's faulthandler later": ("", FAULTHANDLER),
    "not chained": ("", FAULTHANDLER.replace(", chain=True", "")),
    "user's faulthandler later, unregistered": ("", f"{FAULTHANDLER}; faulthandler.unregister(signal.SIGTERM)"),
}
PROGRAM = """
import ctypes, gc
tracing.stop()
gc.freeze()  # else each child copies all that torch has, to collect it
libc = ctypes.CDLL(None)
def recorded():  # until the file is there, and SIGTERM writes into it
    deadline = time.monotonic() + 60
    files = lambda: list(folder.glob("*.jsonl")) + list(folder.glob("*/*.jsonl"))
    while (not files() or not all(file.stat().st_size for file in files())) and time.monotonic() < deadline:
        time.sleep(0.002)
def at_cs_exit(function, argument):
    libc.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)
def quiet():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
"""
IN_TURN = (
    PROGRAM
    + """
children = []
for name, (before, after) in {ends!r}.items():
    for trace in (True, False):
        child = os.fork()
        if child:
            children.append((name, child))
            continue
        quiet()
        folder = folder / name.replace(" ", "-")
        exec(before)
        if trace:
            tracing.start(TraceSettings(folder))
            call()
            "sleep" in before or recorded()
        at_cs_exit(libc["raise"], {number})
        exec(after.replace("traced:", "if trace:"))
        sys.exit(0)
codes = {{}}
for name, child in children:
    codes.setdefault(name, []).append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""
)


def test_a_signal_after_the_interpreters_end_does_what_it_does_without_a_trace(tmp_path: Path) -> None:
    output, error = end(start(IN_TURN.format(ends=ENDS, number=int(signal.SIGTERM)), tmp_path))
    codes = ast.literal_eval(output or "{}")
    assert set(codes) == set(ENDS), error
    assert {name: traced for name, (traced, _) in codes.items()} == {name: stock for name, (_, stock) in codes.items()}
    assert codes["Lightning's teardown"] == [-signal.SIGTERM] * 2


OF_OTHERS = """
import faulthandler
tracing.stop()
heard = []
def users(*_):
    heard.append(1)
def ask():
    heard.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    return heard == [1]
def recorded():
    while not list(folder.glob("*/*.jsonl")) or not all(file.stat().st_size for file in folder.glob("*/*.jsonl")):
        time.sleep(0.002)
def traced(name):
    tracing.start(TraceSettings(folder / name))
    call()
    recorded()

signal.signal(signal.SIGTERM, users)
traced("before us")
assert ask()
tracing.stop()
assert ask() and signal.getsignal(signal.SIGTERM) is users

signal.signal(signal.SIGTERM, signal.SIG_IGN)
traced("ignored")
tracing.stop()
os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.SIG_DFL)
traced("after us")
signal.signal(signal.SIGTERM, users)
tracing.stop()
assert ask() and signal.getsignal(signal.SIGTERM) is users

stacks = open(folder / "stacks", "w+")
def stacks_of_the_user():
    stacks.seek(0)
    return stacks.read().count("most recent call first")
faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False, chain=True)  # over a Python handler, before us
traced("the user's faulthandler")
assert ask() and stacks_of_the_user() == 1
tracing.stop()
assert ask() and stacks_of_the_user() == 2
faulthandler.unregister(signal.SIGTERM)
traced("the user's faulthandler later")
faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False, chain=True)
tracing.stop()
assert ask() and stacks_of_the_user() == 3
faulthandler.unregister(signal.SIGTERM)
assert ask() and stacks_of_the_user() == 3
files = len(os.listdir("/proc/self/fd"))
for number in range(5):
    traced(f"again {number}")
    assert ask()
    tracing.stop()
assert len(os.listdir("/proc/self/fd")) == files
print("as it was")
"""


def test_who_handled_sigterm_before_or_handles_it_since_has_it_as_it_was(tmp_path: Path) -> None:
    output, error = end(start(OF_OTHERS, tmp_path))
    assert output == "as it was\n", error


RANDOM = (
    PROGRAM
    + """
import collections, random
draw, codes, whole = random.Random({seed}), collections.Counter(), folder
for number in range({ends}):
    before, after = draw.choice({kinds!r})
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        quiet()
        folder = folder / str(number)
        exec(before)
        tracing.start(TraceSettings(folder))
        call()
        recorded()
        exec(after)
        at_cs_exit(libc.usleep, 100_000)
        at_cs_exit(libc.close, writer)  # comes first: Python's part of the end is over
        os.write(writer, b".")
        sys.exit(0)
    os.close(writer)
    os.read(reader, 1)
    if draw.random() < 0.5:
        os.read(reader, 1)  # nothing, but then
    os.close(reader)
    for _ in range(draw.choice((1, 1, 3))):
        time.sleep(draw.uniform(0, 0.1))
        os.kill(child, signal.SIGTERM)
    codes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
print(dict(codes))
"""
)


def test_sigterm_at_random_moments_of_the_end_never_crashes(tmp_path: Path) -> None:
    kinds = [ENDS[name] for name in ("default", "user's handler", "another handler set later", "Lightning's teardown")]
    output, error = end(start(RANDOM.format(seed=7, ends=120, kinds=kinds), tmp_path))
    codes = ast.literal_eval(output or "{}")
    assert sum(codes.values()) == 120, error
    assert set(codes) <= {0, 9, -signal.SIGTERM}, codes


# What a traced process does before SIGTERM, and after it.
NOTES = "signal.signal(signal.SIGTERM, lambda *_: came.append(1))"
RAISES = "tracing.recorder.trainer_failed(ValueError('no such audio'))"
CLOSED = "tracing.recorder.trainer_failed(ValueError('what teardown brings about'))"
WHEN = {
    "dies in C code": ("", ""),
    "goes on": (NOTES, "call()"),
    "raised before": (RAISES, ""),
    "raises after": (NOTES, CLOSED),
}
AT = (
    PROGRAM
    + """
import json
from multiprocessing import Pipe
times = {{}}
for name, (before, after) in {when!r}.items():
    ours, theirs = Pipe()
    child = os.fork()
    if not child:
        quiet()
        folder, came = folder / name, []
        tracing.start(TraceSettings(folder))
        exec("" if "trainer" in before else before)
        call()  # SIGTERM's handler is ours from here on
        recorded()
        if "trainer" in before:
            exec(before)
            while b'"failed"' not in next(folder.glob("*")).read_bytes():
                time.sleep(0.002)
        theirs.send("")
        while not after:
            libc.pause()
        while not came:
            time.sleep(0.002)
        theirs.send("")
        theirs.poll(60)
        exec(after)
        sys.exit(0)
    ours.recv()
    sent = time.time()
    os.kill(child, signal.SIGTERM)
    if after:
        ours.recv()
    else:
        os.waitpid(child, 0)
    times[name] = sent, time.time()
    if after:
        time.sleep(0.5)  # so much later the next record is written
        ours.send("")
        os.waitpid(child, 0)
print(json.dumps(times))
"""
)
CLOCK_S = 0.1  # of the kernel's time for files, and for a record to be on its way


def test_the_time_of_sigterm_is_known_and_what_was_raised_before_it_is_told_from_what_came_after(
    tmp_path: Path,
) -> None:
    output, error = end(start(AT.format(when=WHEN), tmp_path))
    times = json.loads(output or "{}")
    assert set(times) == set(WHEN), error
    found = {name: ended(tmp_path / name) for name in WHEN}
    for name, (sent, came) in times.items():
        trace, _ = found[name]
        assert trace.sigterm_stack and trace.sigterm_at is not None
        assert sent - CLOCK_S <= trace.header.started + trace.sigterm_at <= came + CLOCK_S, name
    assert found["raised before"][1].own_error == "ValueError: no such audio"
    for name in ("dies in C code", "goes on", "raises after"):
        trace, process = found[name]
        assert process.terminated and not process.error, name
        assert process.at == trace.sigterm_at
    kinds = traces.kinds(records_of(tmp_path / "goes on"))
    assert kinds.count("sigterm") == 1
    (copy := tmp_path / "copy").mkdir()
    for name in WHEN:
        (file,) = traces.files(tmp_path / name)
        shutil.copyfile(file, copy / file.name)  # now
        copied, process = ended(copy)
        (copy / file.name).unlink()
        if WHEN[name][1]:  # the record tells, whatever becomes of the file
            assert copied.sigterm_at == found[name][0].sigterm_at
        else:
            assert copied.sigterm_at is not None and copied.sigterm_at >= (found[name][0].sigterm_at or 0)
        assert process.own_error == found[name][1].own_error


def ended(folder: Path) -> tuple[RankTrace, ProcessEnd]:
    trace = Folder(folder).read().traces[0]
    return trace, process_end(trace)


def records_of(folder: Path) -> list[dict[str, Any]]:
    """All but the stack."""
    (file,) = traces.files(folder)
    return [json.loads(line) for line in file.read_bytes().splitlines() if line.startswith(b"{")]
