"""How a rank's process ended, or is held up:
the kinds of facts.Condition, and how some of its texts begin.
"""

from __future__ import annotations

from collections.abc import Mapping

# The first two explain what other ranks say after them.
RAISED = "raised"  # an exception of its own, or a CUDA error; one that nobody else brought about
# A signal but SIGTERM, SIGINT, SIGHUP and SIGABRT; or for want of memory.
KILLED = "killed"
# Somebody saw its process go, and nobody saw why (Ray): a consequence, after its own time-out
DIED = "died"
STOPPED = "stopped"  # state T: SIGSTOP, Ctrl-Z
TRACED = "traced"  # a debugger holds it
ENDED = "ended"  # its interpreter came to its end, or it left its process group
GONE = "gone"  # it is there no more, and how it ended is not known
# It does not answer: stopped, killed, its host unreachable, or Python's lock held
SILENT = "silent"
UNSEEN = "unseen"  # no sign of it, although there should be one
# Its launcher tells an exit code, which may be that of a rank that waited.
FAILED = "failed"
# Its launcher tells SIGABRT or stall_exit: so a rank ends that waited in vain, and others too
ABORTED = "aborted"
# A time-out of a collective, or of the store: another rank is the reason.
WAITED = "waited"
CUT = "cut"  # a closed connection ended it: another rank had gone before
# Its collective got the message of another one: two ranks are in unlike collectives
MISPAIRED = "mispaired"
TERMINATED = "terminated"  # SIGTERM, Ctrl-C, stall_exit: somebody else ended it
# Another rank's report, or torch's own, says that it has not come; text: to what
MISSING = "missing"
# Its NCCL watchdog does not get on: a CUDA or NCCL call does not return; perhaps it waits
STUCK = "stuck"
# Its log has a traceback, and nothing tells whether that ended it: it may have been caught
LOGGED = "logged"
# An exception ended a thread of it, such as one that reads ahead: its training may wait for that
THREAD = "thread"
PASSED_ON = "passed on"  # it ended by an exception that another rank had raised, and all were told
NODE = "node"  # its node failed, says the scheduler or the launcher
# It cannot resolve the address at which the ranks meet; harmless if it starts all the same
UNRESOLVED = "unresolved"
# By general words of a line, which no table knows: that it died, or that it is not there
TOLD_DEAD, TOLD_ABSENT = "told dead", "told absent"
TOLD_APART = "told apart"  # likewise by a table: behind all others, or held up
# Something that was wrong around the ranks, and decides nothing: told beside a verdict
HINT = "hint"
HEARD = "heard"  # it was told of another rank's time-out, and had none itself
RUNS = "runs"  # it is there
UNREADABLE = "unreadable"  # it is there, and may not be looked at; text says why

# How the text of such a WAITED or CUT begins: there was no process group yet
AT_START = "at start-up"
# Likewise of a CUT rank whose process has no end.
SYNC_ENDED = "its length sync has ended"
# Likewise of an UNSEEN rank that the log has lines of.
NO_TIME_OUT = "the log has no time-out of it, as of the others"
FROM_OUTSIDE = "SIGTERM, which torchrun had not sent"  # the text of such a TERMINATED
BY_MONITOR = (
    "its monitor"  # how the text of a TERMINATED begins that something had found hung
)
TIME_LIMIT = "the time limit"  # how the text of a TERMINATED by the scheduler begins
PREEMPTED = "preemption"  # likewise
REQUEUED = "a requeue"  # likewise
FOR_MEMORY = "for want of memory"  # how the text of such a KILLED begins
OF_KERNEL = "the kernel: "  # how the text begins of what the kernel tells
UNTOLD = "by Ray, which does not tell how"  # likewise of a DIED
STALL_EXIT = "stall_exit"  # the text of a TERMINATED that ended itself so

CAUSES = frozenset({RAISED, KILLED, NODE})
CONSEQUENCES = frozenset({MISPAIRED, WAITED, CUT, PASSED_ON})
HELD = frozenset({STOPPED, TRACED})
OVER = CAUSES | CONSEQUENCES | {TERMINATED, ENDED, FAILED, GONE, ABORTED}
NOT_HEARD = frozenset({SILENT, UNSEEN, MISSING, GONE})
# Of several that are told of a rank the first counts: causes before consequences, what is known
# before what is not.
RANKED = (
    *(
        RAISED,
        KILLED,
        NODE,
        STOPPED,
        TRACED,
        MISPAIRED,
        WAITED,
        CUT,
        PASSED_ON,
        STUCK,
        ABORTED,
        DIED,
    ),
    *(TERMINATED, ENDED, FAILED, GONE, SILENT, MISSING, UNSEEN, UNREADABLE, THREAD),
    LOGGED,
    *(TOLD_DEAD, TOLD_ABSENT, TOLD_APART, UNRESOLVED, HEARD, RUNS),
)

# What a rank did, in words.
WORDS = {
    STOPPED: "it is stopped (state T, SIGSTOP or Ctrl-Z)",
    TRACED: "a debugger holds it",
    RAISED: "it raised an exception",
    KILLED: "it was killed",
    GONE: "it was killed or crashed: no record tells of its end",
    ENDED: (
        "it has ended: fewer batches, or an error that something caught (Hydra does)"
    ),
    FAILED: "it failed",
    SILENT: (
        "it does not answer: stopped, killed, its host unreachable, or Python's lock"
        " (GIL) held"
    ),
    MISSING: "it had not come",
    UNSEEN: "there is no sign of it: not started, not patched, or not yet there",
    TERMINATED: "somebody ended it",
    ABORTED: "it aborted, as ranks do that waited in vain",
    STUCK: "its NCCL watchdog got stuck",
    THREAD: "an exception ended a thread of it",
}
# Of those that have a line of evidence.
EVIDENCE = {
    **WORDS,
    WAITED: "a time-out: a consequence, it waited",
    MISPAIRED: "its collective met another one: no fault of its own by itself",
    CUT: "a connection closed: a consequence, another rank had gone",
    PASSED_ON: "a consequence: it passed on",
    UNRESOLVED: "it cannot resolve the address at which the ranks meet",
    HEARD: "it was told of another rank's time-out, and had none itself",
    GONE: "no record tells of its end",
    UNREADABLE: "its stack could not be read",
    LOGGED: "a traceback, which may have been caught",
}


def in_words(kind: str, text: str, words: Mapping[str, str] = WORDS) -> str:
    """What a rank did, or what its line of evidence says. text: the condition's."""
    if kind in (TERMINATED, ABORTED) and text.startswith(STALL_EXIT):
        return "it ended itself"
    if text.startswith(UNTOLD):
        return "it died"
    return words[kind]
