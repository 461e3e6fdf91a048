"""The one table of a log's lines: a line's shape, and what it tells.

Tracebacks, and the texts of our own lines, have files of their own.

A row's groups: rank, ranks, pid: whose; code, signal: how it ended; size: of the job; others go
into the text. What several lines tell has a reader, by its name: in c10d_lines.py,
launcher_lines.py, ras_lines.py.

The filter over whole blocks of a log is made of the rows' words, and of those general ones by which
hearsay_lines.py reads what no row knows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.conditions import (
    CUT,
    FAILED,
    HEARD,
    HINT,
    KILLED,
    MISPAIRED,
    MISSING,
    NODE,
    RAISED,
    STUCK,
    TERMINATED,
    THREAD,
    TOLD_DEAD,
    UNRESOLVED,
    WAITED,
)
from nemo_patches.tools.diagnose.sources import (
    encoder_prints,
    hearsay_lines,
    table_lines,
)


class Row(NamedTuple):
    """words: one of these is in each such line. kind: of the condition, empty: by its code or
    signal.

    reader: the method take_.. of that name reads the line. of_rank: only of a line that has a rank.
    is_end: a launcher's, of the end of a process: the first such row of a line counts. is_whole: a
    line that it matches does not go on in the next. follows: only near lines of other rows, so
    its words are no part of the filter.
    """

    words: tuple[str, ...]
    pattern: re.Pattern[str]
    kind: str = ""
    text: str = ""
    reader: str = "condition"
    own: bool = True
    of_rank: bool = False
    is_end: bool = False
    is_whole: bool = False
    follows: bool = False


_BY_OTHERS = (HINT, MISSING, TERMINATED, TOLD_DEAD)  # who tells such conditions


def _row(
    words: str, pattern: str, kind: str = "", text: str = "", **more: object
) -> Row:
    more.setdefault("own", kind not in _BY_OTHERS)
    return Row(tuple(words.split("|")), re.compile(pattern), kind, text, **more)  # type: ignore[arg-type]  # flags


def _end(
    words: str,
    pattern: str,
    kind: str = "",
    text: str = "",
    reader: str = "end",
    **more: object,
) -> Row:
    return _row(
        words, pattern, kind, text, reader=reader, own=False, is_end=True, **more
    )


_RANKS = r"[\d, -]{1,20000}"
_LAST_WORK = (
    r"[Ll]ast ?enqueued ?(?:NCCL ?)?work: ?(-?\d{1,18}), ?last ?completed ?(?:NCCL ?)?"
    r"work: ?(-?\d{1,18})"
)
_OF_GLOO = r"(?:gloo[/:]|ProcessGroupGloo).{0,300}?"
_STATES = (
    "COMPLETED|PREEMPTED|REQUEUED|NODE_FAIL|FAILED|CANCELLED|TIMEOUT|OUT_OF_ME|RUNNING|"
    "PENDING"
)
_GONE = (
    r"^(?!.*NCCL INFO).*?(?:ncclRemoteError|Connection closed by remote peer|"
    r"remote process exited or there was a network error)"
)
_CLOSED = "remote process exited, or a network error"
# In one line, of a thread that reads ahead; not where it tries again
_THREAD_DIED = (
    r"(?!.*\b(?i:retr|re-?start|skipp|ignor))(?i:\b(?:thread|prefetch\w*|producer|loader|fetcher)\b"
    r".{0,60}?\b(?:died|dead|crash\w*|failed|exception|exited|aborted|stopped|raised)\b|"
    r"\bexception in (?:\w+ ){0,2}(?:thread|prefetch\w*|producer|loader)\b)"
    r".{0,80}?(?P<error>\b[A-Z]\w*(?:Error|Exception)\b.{0,200})"
)
_OF_MPIRUN = (
    r"process rank (?P<rank>\d{1,7}) with PID \d{1,9} on node (?P<node>\S{1,80}) "
)
FINGERPRINT = re.compile(
    r"Rank ?(\d{1,7}) ?is ?running ?collective: ?CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d{1,18}),? ?)?OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?"
    r"(?:, ?TensorDtypes=(\w{1,40}))?"
)
# Our own lines, which no row reads: their texts are in stall_lines.py.
OURS = re.compile(
    r"(?:^|\s)nemo_patches (INFO|WARNING|ERROR) \[rank (\d{1,7}|\?)/(\d{1,7}|\?)"
    r" ([^\]]{0,100})\] (.*)"
)

ROWS = (
    # What a line says of its launch
    _row("x across cluster]", "x across cluster]", reader="left_out"),
    _row(
        "ip|addr|host",
        r"\b(?i:ip|addr(?:ess)?|host(?:_?ip)?)[ =:]{1,3}(\d{1,3}(?:\.\d{1,3}){3})\b",
        reader="address",
        of_rank=True,
        follows=True,
    ),
    _row(
        "Data for node: ",
        r"\bData for node: (\S{1,200})\s.{0,80}Num procs: ",
        reader="mapped_node",
    ),
    _row(
        "Process rank: ",
        r"\bProcess (?:OMPI )?jobid: .{0,80} Process rank: (\d{1,7})\b",
        reader="mapped_rank",
    ),
    _row("Starting with", r"Starting with (\d{1,7}) processes", reader="size"),
    _row(
        "pid",
        r"(?:\bpid=(\d{1,9})\b[^)]{0,80}\)\s(?:(?!pid=|ProcessGroup).){0,200}?"
        r"(?:\[[Rr]ank[ =]?|world_rank=|\b(?:[Rr]unning on|as) rank )(\d{1,7})\b(?!\]$)|"
        r"\[rank=(\d{1,7})\] pid=(\d{1,9})|"
        r"\bpid:? (\d{1,9}), (?:global )?rank:? (\d{1,7})\b|"
        r"(?<!ocal )\b[Rr]ank[ =:]{0,2}(\d{1,7}),? \(?pid[ =:]{1,2}(\d{1,9})\b)"
        r"(?:(?: ?/| of|, world_size=) ?(?:size )?(\d{1,7}))?",
        reader="pid",
        follows=True,
    ),
    _row(  # what a shell prints of processes' environments, in one line or in several
        "RANK=|PROCID=|LOCALID=|/environ",
        r"^\s{0,8}(?:(?:/proc/|pid[ =:]{1,2})?(?P<pid>\d{2,9})(?:/environ)?[ \t:]{1,4})?"
        r"(?=.*(?:RANK|PROCID|LOCALID)=)(?:\w{1,40}=\S{0,80}\s{0,4}){1,9}$|"
        r"/proc/(?P<next>\d{2,9})/environ\b",
        reader="environment",
        follows=True,
    ),
    _row(  # strace's, of a process that it has come to
        "stopped by SIG|strace: Process",
        r"^(?:\[pid +(?P<pid>\d{1,9})\] )?--- stopped by SIG(?:STOP|TSTP|TTIN|TTOU) ---|"
        r"strace: Process (?P<next>\d{1,9}) attached",
        reader="stopped",
    ),
    _row(
        "spawned with",
        r"process (?P<pid>\d{1,9}) spawned with command: .{0,2000}"
        r"--local_rank=(?P<local>\d{1,6})\b",
        reader="spawned",
    ),
    _row(
        "num_local_procs",
        r"nnodes=(?P<nodes>\d{1,6}), num_local_procs=\d{1,6}, node_rank=",
        reader="nodes",
    ),
    _row(
        "ank",
        r"^ {0,5}(?:(?P<task>\d{1,6}): )?.{0,40}?(?<![a-z_])[Rr]ank[ =:#]?(?P<rank>\d{1,6})\b",
        reader="label",
        follows=True,
    ),
    _row(
        "timeout|timed out in|closing signal|dump signal|monitoredBarrier|failed|first observed|"
        "return code",
        r"collective operation timeout|timed out in blocking wait|closing signal SIG|dump signal|"
        r"monitoredBarrier|failed \(exitcode|first observed failure|exits with return code",
        reader="over",
        follows=True,
    ),
    _row(  # a job's own watch over hangs
        "ang detected|eadlock detected|tall detected|etected a |etected hang|etected deadlock|"
        "etected possible|etected potential",
        r"(?<!no )(?<!No )\b(?i:hang|deadlock|stall) detected|"
        r"\b[Dd]etected (?:an? )?(?:possible |potential )?(?:hang|deadlock|stall)\b",
        reader="hang",
    ),
    # torch's watchdog, and its reports
    _row(
        "#",
        r"^\s{0,99}(?:\[rank\d{1,7}\]: ?)?#\d{1,3} (\S{1,200}) from (.{1,500}):(\d{1,9})\s{0,99}$",
        reader="stack_frame",
        follows=True,
    ),
    _row(
        "WorkNCCL(",
        r"(?:aught ?collective ?operation ?timeout:|\] Work) ?WorkNCCL\((?:SeqNum=(\d{1,18}), ?)?"
        r"OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?(?:, ?NumelIn=(\d{1,18}))?",
        reader="timeout",
        of_rank=True,
    ),
    _row(
        "enqueued",
        r"(?:at ?work|NCCL ?work|work ?sequence ?id): ?(\d{1,18}).{0,40}?" + _LAST_WORK,
        reader="status",
        of_rank=True,
    ),
    _row(
        "enqueued",
        r"(?:dump ?signal ?due ?to ?a ?collective|global) ?timeout ?from {0,3}"
        r"(?:(this ?local)|(?:another ?)?rank ?(\d{1,7})?)?"
        r".{0,120}?" + _LAST_WORK,
        reader="signal",
    ),
    Row(("ollective",), FINGERPRINT, reader="fingerprints"),
    _row(
        "comm_count:",
        r"Find (?:last group comm|(?P<timed_out>timeout start but not finish)) task:"
        r".{0,80}?\bgroup_key:(?P<group>\w{1,80}),.{0,9999}?\bglobal_rank:(?P<rank>\d{1,7}),"
        r".{0,40}?\bcomm_count:(?P<number>\d{1,18}),op:(?P<kind>\w{1,40}),started:1,"
        r"completed:(?P<done>[01])\b(?:,numel:(?P<size>\d{1,18}))?",
        reader="paddle",
    ),
    _row(
        "inconsistent",
        r"DDP expects same model across all ranks, but Rank (\d{1,7}) has (\d{1,9}) params, "
        r"while rank (\d{1,7}) has inconsistent (\d{1,9}) params",
        reader="parameters",
    ),
    _row(
        "arrier",
        r"(Timed out initializing|Waiting in) (?:process group in )?store based barrier.{0,80}?"
        r"rank:? ?(\d{1,7}),.{0,20}key: ?(\S{1,80}?) ?\(world_size=(\d{1,7}),"
        r" ?(?:worker_count|num_workers_joined)=(\d{1,7})",
        reader="barrier",
        is_whole=True,
    ),
    _row(
        "arrier",
        r"Rank (\d{1,7}): Completed store-based barrier for ",
        reader="passed",
    ),
    _row(
        "NCCL",
        r"\[(\d{1,7})\] is setting up NCCL communicator and retr\w{1,10} ?ncclUniqueId from"
        r" \[(\d{1,7})\]",
        reader="unique_id",
    ),
    _row(
        "ollective",
        "Stack trace of the failed collective(?!.*not found)",
        reader="stack_begins",
    ),
    _row(
        "lagging ranks",
        rf"ranks? \[(?P<missing>{_RANKS})\] are the lagging ranks",
        text="any collective",
        reader="report",
    ),
    _row(
        "ollective",
        rf"\[(?P<missing>{_RANKS})\] finished coll.{{0,40}} didn't join",
        text="the next collective",
        reader="report",
    ),
    _row(
        "joined but",
        rf"\[(?P<joined>{_RANKS})\] joined but didn't finish collective",
        reader="report",
    ),
    _row(
        "monitoredBarrier",
        rf"(?:\[Rank (?P<joined>\d{{1,7}})\]: )?Ranks? (?P<missing>{_RANKS}) failed to"
        r" pass monitoredBarrier",
        text="monitored_barrier",
        reader="report",
    ),
    _row(
        "monitoredBarrier",
        r"Rank (?P<joined>\d{1,7}) successfully reached monitoredBarrier",
        reader="report",
    ),
    # fr_trace's; who was expected is in the line after who is missing
    _row(
        "missing ranks: {",
        rf"missing ranks: \{{(?P<missing>{_RANKS})\}}",
        text="a collective, by fr_trace",
        reader="report",
        follows=True,
    ),
    _row(
        "expected ranks: {",
        rf"expected ranks: \{{(?P<joined>{_RANKS})\}}",
        reader="report",
        follows=True,
    ),
    _row(  # fr_trace -j: a column for each rank
        "Rank 0  ",
        r"^Rank \d{1,7}(?: +Rank \d{1,7})+$",
        reader="recorder_head",
    ),
    _row(
        "state=",
        r"^\s*\w[\w.:]*\(.*\bstate=\w+\)$",
        reader="recorder_row",
    ),
    # What torch, Gloo and NCCL say of one rank
    _row(
        "gai error",
        r"^(?=.*\(gai error: )(?:.*network addresses of \(?(?P<at>[^,)]{1,200})[^)]{0,40}\)?"
        r" cannot be retrieved )?.*?\(gai error: (?P<why>-?\d{1,4}[^)]{0,80})",
        UNRESOLVED,
        "{at}: {why}",
    ),
    _row(
        "due to timeout",  # torch 2.15's nccl2 says no more than this
        r"\[rank=(?P<rank>\d{1,7})\](?:\[name=(?P<name>[^\]]{1,40})\])? ?Aborting process on"
        r" rank \d{1,7} due to timeout",
        WAITED,
        "a collective of group {name} timed out",
    ),
    _row(
        "Timed out after",
        r"Timed out after \d{1,9} seconds waiting for (?:clients|workers)\."
        r" (?P<came>\d{1,7})/(?P<size>\d{1,7})(?: |$)",
        WAITED,
        f"{conditions.AT_START}: {{came}} of {{size}} ranks had joined its store",
        is_whole=True,
    ),
    _row(
        "gloo|Gloo|pair closure",
        rf"(?:{_OF_GLOO}|(?=Application))(?P<error>Timed ?out ?waiting ?\d+ ?ms[\w ]{{0,60}}|"
        r"Application timeout caused pair closure)",
        WAITED,
        "{error}",
        is_whole=True,
    ),
    _row(
        "gloo|Gloo",
        rf"{_OF_GLOO}(?P<error>Connection ?(?:closed|reset) ?by ?peer(?: \[[\d.]{{7,15}}\])?)",
        CUT,
        "{error}",
        is_whole=True,
    ),
    _row(
        "Duplicate GPU",
        r"Duplicate GPU detected : rank (?P<first>\d{1,7}) and rank"
        r" (?P<second>\d{1,7}) both on CUDA device (?P<device>\w{1,20})",
        RAISED,
        "Duplicate GPU: ranks {first} and {second} both use CUDA device {device}",
    ),
    _row(
        "imed out",
        r"client socket has timed out after \d{1,12} ?m?s while trying to connect to"
        r" \(?(?P<at>[^)]{1,200})",
        WAITED,
        f"{conditions.AT_START}: it could not connect to the store at {{at}}",
        is_whole=True,
    ),
    _row(
        "ncclRemoteError|remote peer|network error",
        _GONE,
        CUT,
        _CLOSED,
        of_rank=True,
    ),
    _row(
        "socketProgress|NET/|ncclRemoteError|remote peer|network error",
        rf"^(?:(?={_GONE})|(?!.*NCCL INFO)(?=.*(?:socketProgress|NET/))).*?"
        r"(?:[Pp]eer|from) (?P<peer>[\w.:\-]{1,200}<\d{1,6}>)",
        CUT,
        _CLOSED + "; its peer: {peer}",
        of_rank=True,
    ),
    _row(
        "terminated with exception",
        r"thread terminated with exception: (?P<error>CUDA error: .{1,200}?)(?:CUDA kernel|$)",
        RAISED,
        "{error}",
        of_rank=True,
    ),
    _row(  # of ROCm, which ends the process
        "by GPU",
        r"(?P<how>HW Exception|Memory access fault) by GPU .{1,80}?"
        r"(?P<what>[Rr]eason ?:[^.]{1,80})",
        RAISED,
        "{how} by GPU, {what}",
    ),
    _row(  # likewise
        "HSA_STATUS",
        r"aborting with error ?: ?(?P<what>HSA_STATUS_\w{1,80})",
        RAISED,
        "{what}, of ROCm",
    ),
    _row(
        "op.preamble.",
        r"(?P<what>\bop\.preamble\.\w{1,20} .{1,200})",
        MISPAIRED,
        "{what}",
    ),
    _row(  # others end so after a time-out
        "terminate called",
        r"terminate called after throwing an instance of"
        r" '(?P<what>(?!c10::|gloo::|std::runtime_error)[\w:<>]{1,80})'",
        RAISED,
        "{what}, of C++",
        of_rank=True,
    ),
    _row(
        "NCCL|To avoid data|watchdog",
        "Some NCCL operations have failed|To avoid data inconsistency|"
        "watchdog thread terminated with exception",
        WAITED,
        "its NCCL operations failed, or timed out",
        of_rank=True,
    ),
    _row(
        "watchdog|eartbeat",
        r"watchdog got stuck for \d{1,9} seconds|Heartbeat monitor timed out|"
        r"no heartbeat of its watchdog|watchdog hang",
        STUCK,
        "its NCCL watchdog got stuck",
        of_rank=True,
        is_whole=True,
    ),
    *(
        _row(
            "hread|refetch|roducer|oader",
            begin + _THREAD_DIED,
            THREAD,
            "{error}, in a thread",
            of_rank=not begin,
        )
        for begin in ("", r"\b[Rr]ank[ =:#]?(?P<rank>\d{1,6})\b.{0,80}?")
    ),
    _row(
        "EI000",
        r"EI000[26]: .{0,200}?\btimes? ?out",
        WAITED,
        "an operation of HCCL timed out",
        of_rank=True,
    ),
    _row(
        "rankId[",
        r"EI0002: .{0,200}?\btimes? ?out.{0,2000}:\[hccl_world_group\].{0,200}"
        r"\brankId\[(?P<rank>\d{1,7})\]",
        WAITED,
        "an operation of HCCL timed out",
    ),
    _row(  # a kernel's own, of Ascend: no rank that waits ends so
        "core exception|error exception",
        r"(?P<what>\bai(?:v(?:ec)?|c(?:ore)?) error exception\b.{0,80}|"
        r"\b(?:vector|cube|ai) ?core exception\b)",
        RAISED,
        "{what}",
        of_rank=True,
    ),
    _row(
        "Observed flight|timeout from another",
        "Observed flight recorder dump signal from|"
        "Received a global timeout from another rank",
        HEARD,
        of_rank=True,
    ),
    # Launchers, schedulers and the kernel, on processes that ended
    _row(
        " : ",
        r"\b(?:time      : (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)|"
        r"host      : (?P<host>\S{1,255})|"
        r"rank      : (?P<rank>\d{1,7}) \(local_rank: (?P<local>\d{1,7})\)|"
        r"exitcode  : (?P<code>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\))",
        reader="table",
        follows=True,
    ),
    _row(  # what programs write when training has come to its end, in good order
        "eturning from train|raining finished|raining complete|raining done|inished training|"
        "Trainer.fit` stopped|Done waiting for|inal validation m|inal eval|inal test|inal check|"
        "inal model",
        r"[Rr]eturning from train|(?:[Tt]raining (?:has |is"
        r" )?(?:finished|completed?|done)|[Ff]inished training)"
        r"(?! (?:for |of )?(?:it|iter\w*|step|batch|epoch|update|round|stage|fold)\b)|"
        r"`Trainer\.fit` stopped: `max_|Done waiting for other agents|"
        r"\b[Ff]inal (?:validation|test|eval\w*) (?:metrics|results)\b|[Ss]aved (?:the )?final "
        r"(?:checkpoint|model)|[Ff]inal (?:checkpoint|model) (?:was |is )?(?:saved|written)",
        reader="finished",
    ),
    _row(  # of a suite of tests, which may bring about what it tells of
        "Ran ", r"^Ran \d{1,7} tests? in [\d.]{1,12}s$", reader="tests"
    ),
    _row("OK", r"^OK(?: \([\w =,]{1,80}\))?$", reader="tests_passed", follows=True),
    _row(  # what launchers write of the whole job, or pytest of all tests
        "succeeded|successfully|code 0|status 0| passed",
        r"^(?:=+ )?\d{1,7} passed(?:, \d{1,7} (?:skipped|deselected|xfailed|xpassed|warnings?|"
        r"rerun))* in [\d.]{1,12}s\b|"
        r"\bJob '\S{1,80}' succeeded|\b[Aa]ll (?:\d{1,7} )?"
        r"(?:workers|processes|ranks|tasks|trainers) (?:have |has )?(?:succeeded|"
        r"(?:exited|finished|completed|ended|done|terminated) (?:successfully|"
        r"with (?:an? )?(?:exit )?(?:code|status) 0)\b)",
        reader="succeeded",
    ),
    _row(  # sacct's, of a job or a step
        _STATES,
        r"^\s{0,20}(?P<id>\d{2,12}(?:[._+]\w{1,12}\+?)*)[ |].{0,200}?[ |]"
        rf"(?P<state>{_STATES})(?=.*\d:\d|.*\d-\d)",
        reader="accounting",
        follows=True,
    ),
    _row(
        "Out Of Memory",
        r"srun: error: \S{1,80}: tasks? (?P<tasks>[\d,\-]{1,200}): Out Of Memory",
        reader="tasks_out_of_memory",
    ),
    _row("elastic|torchrun", "elastic|torchrun", reader="by_torchrun", follows=True),
    _row(  # torchrun's agents, one a node, meet before they start any rank
        "attempts to join|has joined|min_nodes|RendezvousTimeoutError|odes|odelist|NODELIST",
        r"^(?: {0,5}(?P<task>\d{1,6}): )?.{0,200}?(?:"
        r"The node '(?P<node>[\w.-]{1,200}?)(?:_\d{1,9}_\d{1,3})?' (?:attempts to join|has joined) "
        r"the next round|"
        r"\bmin_nodes\s{0,20}[:=] ?(?P<least>\d{1,6})|(?P<over>RendezvousTimeoutError)|"
        r"(?<![A-Za-z])(?i:nodes|nodelist)[ :=]{1,3}(?P<list>[\w.,-]{0,200}\[[\d,-]{1,2000}\]))",
        reader="rendezvous",
        follows=True,
    ),
    _row(
        "pyxis: ",
        r"^ {0,5}(?P<task>\d{1,6}): (?P<what>pyxis: .{1,200})",
        reader="container",
        follows=True,
    ),
    _end(
        "exitcode",
        r"failed ?\(exitcode: ?(?P<code>-?\d{1,9})\) ?local_rank: ?(?P<local>\d{1,7})"
        r" ?\(pid: ?(?P<pid>\d{1,9})\)",  # a terminal may have wrapped it at a blank
        reader="failed",
        is_whole=True,
    ),
    _end(  # processes that torchrun ends, as others had failed
        "closing signal|forcefully",
        r"[Ss]ending process (\d{1,9}) closing signal |"
        r"[Pp]rocess (\d{1,9}) via \S{1,20}, forcefully exiting",
        reader="sent",
        is_whole=True,
    ),
    _end(
        "srun: error",
        r"srun: error: (\S{1,80}): tasks? ([\d,\-\[\]]{1,200}): "
        r"(?:(Killed|Bus error|Segmentation fault)|Exited with exit code"
        r" (\d{1,3})|(Aborted|Terminated))",
        reader="srun",
    ),
    _end(  # mpirun's on the first process that failed, in two lines: Open MPI's, and MPICH's
        "Process name: |RUNNING AT",
        r"Process name: \[(?:\[\d{1,9},\d{1,9}\]|[\w.@\-]{1,200}),(?P<rank>\d{1,7})\]|"
        r"^= {1,8}(?:RANK (?P<of>\d{1,7}) )?PID (?P<pid>\d{1,9}) RUNNING AT (?P<node>\S{1,80})",
        reader="mpi",
    ),
    _end(
        "Exit code|EXIT |BY SIGNAL",
        r"^(?:\s{1,8}Exit code|= {1,8}EXIT CODE): {1,8}(?P<code>\d{1,3})$|"
        r"^(?:= {1,8}KILLED BY SIGNAL: |.{0,80} EXIT STRING: .{1,80}\(signal )"
        r"(?P<signal>\d{1,3})",
        reader="mpi_code",
    ),
    _end(  # how a scheduler ends a job; each group is named as that
        "CANCELLED|TERM_|PBS: job killed",
        r"error: \*\*\* (?:STEP|JOB) \S{1,80} ON \S{1,80} (?P<Slurm>CANCELLED AT .{1,120}?)"
        r" ?\*\*\*|"
        r"^(?P<LSF>TERM_(?:RUNLIMIT|PREEMPT|OWNER)\b.{0,120})|(?P<PBS>PBS: job killed:"
        r" walltime .{1,80})",
        reader="cancelled",
        is_whole=True,
    ),
    _end(
        "oom_kill|oom-kill|Out Of Memory|ut of memory|memory limit|memory pressure|low on memory|"
        "TERM_MEMLIMIT|e: memory|OOMKilled|memory used|OUT_OF_ME|running low",
        r"oom[_-]kill event|srun: error: \S{1,80}: tasks? [\d,\-\[\]]{1,200}: Out Of Memory|"
        r"(?:Out of|cgroup out of) memory: Killed process|exceeded (?:job )?memory limit|"
        r"killed due to memory pressure|"
        r"(?:worker|[Tt]ask) was killed due to the node running low on memory|"
        r"\bpid=\d{1,9}, memory used=.{0,80}\bwas running was\b|"
        r"^\d{2,12}(?:[._+]\w{1,12})*[ |].{0,80}\bOUT_OF_ME|"
        r"^TERM_MEMLIMIT|low on resource: memory|OOMKilled",
        KILLED,
        conditions.FOR_MEMORY + ": {line}",
    ),
    _end(
        "bus error",
        r"Unexpected bus error encountered in worker\. This might be",
        KILLED,
        "a data loader's worker: bus error, as for want of shared memory (/dev/shm)",
        of_rank=True,
    ),
    _end(
        "killed by",
        r"(?P<how>DataLoader worker \(pid[^)]{1,80}\) is killed by signal:"
        r" (?!Terminated).{0,200})",
        RAISED,
        "RuntimeError: {how}",
        of_rank=True,
    ),
    _end(
        "Fatal Python",
        r"^(?P<of>\(\w[\w.:-]{0,80} pid=(?P<pid>\d{1,9})[^)]{0,80}\) )?Fatal Python error: "
        r"(?P<how>Segmentation fault|Bus error|Illegal instruction|Floating-point exception)",
        KILLED,
        "{how} {of}",
        of_rank=True,
    ),
    _end(
        "exit",
        r"exits ?with ?return ?code ?= ?(?P<code>-?\d{1,9})",
        text="DeepSpeed's launcher",
        is_whole=True,
    ),
    _end(
        " Killed | Segmentation fault| Bus error",
        r": line \d{1,9}: {1,8}(?P<process>\d{1,9}) (?P<how>Killed|Segmentation fault|Bus error)"
        r" {2,40}\S",
        KILLED,
        "{how}: process {process}, says the shell",
    ),
    _end(
        "with PID",
        _OF_MPIRUN + r"exited on ?signal (?P<signal>\d{1,3})",
        text="mpirun, of node {node}",
        is_whole=True,
    ),
    _end(
        "with PID",
        _OF_MPIRUN + "exiting ?improperly",
        FAILED,
        "it exited improperly, says mpirun, of node {node}",
        is_whole=True,
    ),
    _end(
        "MPI_A",
        r"(?:MPI_ABORT was invoked on rank (?=\d{1,7} in communicator MPI_COMM_WORLD)|"
        r"called MPI_Abort\(MPI_COMM_WORLD, -?\d{1,9}\) - process )(?P<rank>\d{1,7})",
        FAILED,
        "it called MPI_Abort, says mpirun",
    ),
    _end(
        "xit Code|exitCode|exit code|exited with code|Exited (",
        r"(?:Exit Code: {2,8}|exitCode\"?: |-\d{1,4} exited with code |"
        r"\bExited \((?=1[34]\d\))|"
        r"Process (?:finished|completed) with exit code (?=1[34]\d))(?P<code>\d{1,3})\b",
        text="what has started its container",
    ),
    _end(
        "died",
        r"died with <Signals\.\w{1,10}: (?P<signal>\d{1,3})>",
        text="accelerate's launcher",
    ),
    _end(
        "status failed",
        r"Container rank (?P<rank>\d{1,7}) status failed .{0,4000}? code (?P<code>-?\d{1,9})\b",
        text="Paddle's launcher",
    ),
    _end(
        "Remote daemon",
        r"Remote daemon: .{1,200} on node (?P<node>\S{1,200})",
        NODE,
        "mpirun lost the connection to node {node}",
    ),
    _end(
        "Node failure",
        r"srun: error: Node failure on (?P<node>\S{1,200})",
        NODE,
        "Slurm: node failure on {node}",
    ),
    _end(
        "Task launch|Application launch|execve(",
        r"(?:srun|slurmstepd): error: (?P<why>"
        r"(?:(?:Task|Application) launch |execve\(\): ).{1,200})",
        FAILED,
        "Slurm could not start it: {why}",
    ),
    _end(
        "Child process",
        r"\[rank: (?P<local>\d{1,7})\] Child process with PID (?P<pid>\d{1,9})"
        r" terminated with code (?P<code>-?\d{1,3})\.",
        text="Lightning, of local rank {local} (pid {pid})",
    ),
    _end(
        "xception: process",
        r"(?:^|\s|ProcessExited)Exception: (?P<how>process \d{1,7} terminated with signal"
        r" SIG(?:KILL|BUS|SEGV))",
        KILLED,
        "torch.multiprocessing: {how}",
    ),
    _end(
        "ProcessExited",
        r"ProcessExitedException: (?P<how>process \d{1,7} terminated with exit code"
        r" \d{1,3})",
        FAILED,
        "torch.multiprocessing: {how}",
    ),
    _end(
        "death signal",
        r"Received (?:Signals\.)?(?:15|SIGTERM) death signal, shutting",
        TERMINATED,
        "torchrun got SIGTERM",
    ),
    _end(
        "death signal",
        r"Received (?:Signals\.)?\w{1,10} death signal, shutting",
        TERMINATED,
        "torchrun got a signal to end",
    ),
    _end(
        "marked dead",
        r"The node with node id: .{1,200}(?:address|ip): (?P<node>\S{1,80}).{0,200}"
        r" has been marked dead",
        NODE,
        "Ray: node {node} was marked dead",
    ),
    # Ray tells of a worker's death in several lines
    _row(
        "died",
        r"(?:ActorDiedError|RayActorError): The actor died |A worker died or was killed",
        reader="ray_death",
    ),
    _row(
        "Worker exit type",
        r"Worker exit type: (?:INTENDED_(?:USER|SYSTEM)_EXIT|USER_ERROR)",
        reader="ray_by_design",
    ),
    _row(
        "pid: |Worker PID",
        r"^\s{0,16}pid: (\d{1,9})$|Worker PID: (\d{1,9})",
        reader="ray_pid",
    ),
    _row(
        "_per_node",
        r"\b(?:n_gpus|nproc|num_gpus)_per_node['\"]?\s?[=:]\s?(\d{1,3})\b",
        reader="per_node",
        follows=True,
    ),
    _row(
        "name: ",
        r"^\s{0,16}name: \w{1,80}_(\d{1,5}):(\d{1,5})$",
        reader="ray_name",
        follows=True,
    ),
    _row(
        "receives a SIG",
        r"The process receives a (SIGTERM|SIGINT)",
        reader="ray_signal",
    ),
    # Who had not come, by HCCL, Horovod and NCCL's RAS: a communicator, its ranks of one state, and
    # these ranks if they are few
    _row(
        "Notify record",
        r"has not received the Notify record from remote rank:? ?\[(?P<ranks>\d{1,7})\]"
        r".{0,200}tag\[(?P<tag>\w{1,80})",
        MISSING,
        "to {tag}, by HCCL",
    ),
    _row(
        "Notify record",
        r"has not received the Notify record from remote rank:? ?\[(?P<ranks>\d{1,7})\]",
        MISSING,
        "to a collective, by HCCL",
    ),
    _row(
        "Worker proc",
        r"(?P<what>Worker proc \w{1,40}-(?P<ranks>\d{1,6}) died unexpectedly.{0,80})",
        TOLD_DEAD,
        "{what}",
    ),
    _row(
        "remoteRank[",
        r"(?:\[RunFailed\]|createLink para).{0,200}\bremoteRank\[(?:\d{1,7}\]-remoteUserrank\[)?"
        r"(?P<ranks>\d{1,7})\]",
        MISSING,
        "to a connection, by HCCL",
    ),
    _row(
        "connect agent[",
        r"Failed to connect agent\[(?P<ranks>[\d, ]{1,20000})\]",
        MISSING,
        "to the set-up of a group, by HCCL",
    ),
    *(  # a row of HCCL's table: the remote rank, and the own one, which waited for it
        _row(
            " time out ",
            rf"\| +[\d.]{{7,15}}\({remote}\) +\| +\d{{1,10}} +\| +"
            rf"[\d.]{{7,15}}\({own}\) +\|.{{0,40}}"
            r"\| +(?:client|server) +\| time out ",
            kind,
            "a connection, by HCCL" if kind == WAITED else "to a connection, by HCCL",
        )
        for kind, remote, own in (
            (MISSING, r"(?P<ranks>\d{1,7})", r"\d{1,7}"),
            (WAITED, r"\d{1,7}", r"(?P<rank>\d{1,7})"),
        )
    ),
    _row(
        "Exception Location|crimer rank",
        r"(?:Cluster Exception Location\[IP/ID\]:|crimer rank )\[(?P<at>[\d.]{7,15})/"
        r"(?P<number>\d{1,3})\].{0,160}"
        r"(?:ExceptionType:\[(?:Heartbeat Lost|Stuck)|status\[(?:LOST|STUCK))",
        reader="lost",
    ),
    _row(
        "mpirun|horovodrun|mpiexec",
        r"(?:mpirun|horovodrun|mpiexec)\b.{0,400}? -np? (\d{1,7})\b",
        reader="size",
        follows=True,
    ),
    _row(
        "ready ranks:",
        rf"\[ready ranks: {_RANKS}\]",
        reader="ready",
        is_whole=True,
    ),
    _row(
        "SIGKILL",
        r"(?i)\brank (?P<rank>\d{1,7})\b[^.;]{0,80}?\b(?:hung|stuck|unresponsive|timed out)\b"
        r"[^.;]{0,40}?\bwill be (?:terminated|killed)\b|"
        r"\b(?:terminating|killing) rank (?P<ranks>\d{1,7})\b",
        TERMINATED,
        conditions.BY_MONITOR + " killed it",
    ),
    _row("Missing ranks:", "^Missing ranks:$", reader="horovod"),
    _row(
        ": [",
        r"^(\d{1,7})!?: \[(\S{1,200}?(?:, \S{1,200}?){0,20}(?: \.\.\.)?)\]$",
        reader="horovod_rank",
        follows=True,
    ),
    _row(
        "[missing ranks:",
        rf"(?P<tensor>\S{{1,200}}) \[missing ranks: ?(?P<ranks>{_RANKS})\]",
        reader="horovod_tensor",
    ),
    _row("Job summary", r"^Job summary$", reader="ras_answer"),
    _row(
        "#",
        r"^#(\d{1,6}-\d{1,6} \(\w{1,40}\) [A-Z]\w{0,40})",
        reader="ras",
        follows=True,
    ),
    _row(
        "anks have|ank has",
        r"^\s{1,4}(?P<count>\d{1,7}) ranks? (?:has|have)"
        r" (?P<what>(?:launched up to operation (?P<number>\d{1,18})|\w.{1,80}))$",
        reader="ras_state",
    ),
    _row(  # whose process gives RAS no answer
        "Missing communicator data",
        r"^\s{1,4}(Missing communicator data from \d{1,7} ranks?)$",
        reader="ras_silent",
    ),
    _row(
        "he missing rank",
        rf"^\s{{1,4}}The missing ranks?: (?P<ranks>{_RANKS})$",
        reader="ras_silent_ranks",
        follows=True,
    ),
    _row(
        "managed by",
        r"^\s{1,8}Rank (?P<rank>\d{1,7})(?: has (?P<what>launched up to operation "
        r"(?P<number>\d{1,18})|\w.{1,80}))? -- GPU \S{1,20} managed by process (?P<pid>\d{1,9})"
        r" on node (?P<node>\S{1,80})",
        reader="ras_rank",
    ),
    _row(
        "busId|Xid (PCI|the device handle",
        r"(?P<of>\S{1,200}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,3}\] NCCL INFO (?:\w{1,40} )?comm "
        r"\S{1,40} rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7}) .{0,80}"
        r"\bbusId (?P<bus>[0-9a-f]{1,12})\b|"
        r"(?:(?P<on>\S{1,200}) kernel: .{0,40})?NVRM: (?P<what>Xid"
        r" \(PCI:(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).{1,200})|"
        r"(?P<smis>Unable to determine the device handle for GPU ?(?:\d{1,3}: ?)?"
        r"(?P<handle>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).{1,200})",
        reader="gpu",
    ),
    _row(
        "deviceLogicId[",
        r"\bHCCL\((?P<pid>\d{1,9}),.{0,200}\branks\[(?P<size>\d{1,7})\], rank\[(?P<rank>\d{1,7})\],"
        r".{0,40}\bhost ip\[(?P<root>[\d.]{7,15})\].{0,300}\bdeviceLogicId\[(?P<device>\d{1,3})\]",
        reader="entered",
    ),
    _row(
        "rank [",
        r"\bHCCL\((\d{1,9}),.{0,200}\]rank \[([\d.]{7,15})/\d{1,3}\]: rank \[",
        reader="own_address",
    ),
    _row(
        "rank_id|device_id|device_ip|server_id",
        r"\b(?:rank_id|device_id|device_ip|server_id)\b",
        reader="device",
    ),
    _row(
        "ECC|HBM|rror code|EE9999|RUNTIME(",
        r"(?i)(?=.*(?:multi.?bit|uncorrect|error code|fault|ProcessCoreError)).*?"
        r"\bdev(?:ice)?[_ ]?(?:phy_?|logic_?)?id[ =:\[]{1,3}(?P<device>\d{1,3})\b",
        reader="device_error",
    ),
    _row(
        "MxEtpt/Rnk",
        r"MnEtpt/Rnk: ([\d.]{1,12})TF/(\d{1,7}) .{0,40}MxEtpt/Rnk: ([\d.]{1,12})TF/(\d{1,7})",
        reader="throughput",
    ),
    # What was wrong around the ranks
    _row(
        "ock",
        r"(?i:\b(?:waiting|blocked|waits?) (?:for|on) (?:the |a )?(?:file ?)?lock\b|"
        r"lock \d+ not acquired on|could not acquire (?:file ?)?lock)"
        r"[^/]{0,40}(?P<at>/[\w./-]{2,200})",
        HINT,
        "a lock, which a process that has gone may have left: {at}",
    ),
    _row(  # 97: of IPv6, which is tried first
        "has failed to connect|has failed to bind",
        r"socket has failed to (?:connect|bind) to (?P<at>\S{1,200}) "
        r"\(errno: (?!97)\d{1,3} - (?P<why>[^)]{1,80})",
        HINT,
        "a rank could not connect or bind to {at}: {why}",
    ),
    _row(  # of a shell, on a host whose environment is another one
        "not found",
        r"^(?=.*\bnot found\b)(?:[^:]{1,200}: ){1,4}"
        r"(?P<what>torchrun|python[\d.]{0,4}|deepspeed|accelerate|mpirun|srun|ray)"
        r"(?:: (?:command )?not found)?$",
        HINT,
        "a shell found no {what}",
    ),
    _row(  # what ranks that have none do not skip
        "kipping|kipped",
        r"\b(?P<what>(?:out of memory\b.{0,60} )?"
        r"[Ss]kipp(?:ing|ed) (?:(?:this|the|a) )?(?:mini-?)?batch\b)",
        HINT,
        "a rank went on without a batch ({what})",
    ),
    _row(  # of df
        "% /",
        r"^\S+(?:\s+[\d.]+[KMGTP]?i?){3}\s+(?P<use>9[5-9]|100)%\s+(?P<at>/\S{0,200})$",
        HINT,
        "a file system is full: {at} ({use} %)",
    ),
    _row(
        "lowdown",
        r"(?P<what>(?:HW|SW) (?:[Tt]hermal|[Pp]ower)[ _][Ss]lowdown "
        r"(?:is )?(?:[Aa]ctive|detected).{0,80})",
        HINT,
        "a GPU: {what}",
    ),
    _row(
        "NVRM|NVLink|nvlink",
        r"(?:NVRM: |nvidia-nvlink: )(?P<what>(?:Xid|GPU|NVLink|Fatal).{1,200})|"
        r"(?=.*(?:rror|atal|down))(?P<link>NVLink.{1,200})",
        HINT,
        "the kernel: {what}{link}",
    ),
    _row(
        "blocked for|not responding|mlx5|EDAC|Machine check|amdgpu",
        r"(?P<what>INFO: task \S{1,80} blocked for more than \d{1,9} seconds|"
        r"nfs: server \S{1,200} not responding.{0,40}|"
        r"mlx5_\S{1,20}(?:: | \S{1,40} ).{0,80}(?:[Ll]ink down|health|[Ff]atal).{0,80}|"
        r"amdgpu: (?:ring \S{1,40} timeout|GPU reset begin|.{0,80}(?:[Hh]ang|fatal|\bpid \d))"
        r".{0,80}|"
        r"EDAC .{0,80}UE .{0,80}|Machine check events logged)",
        HINT,
        "the kernel: {what}",
    ),
    _row(
        "CUDA_ERROR_",
        r"(?P<what>\bCUDA_ERROR_[A-Z_]{1,60})",
        HINT,
        "the GPU's driver: {what}",
    ),
    _row(
        "Culprit rank",
        r"(?P<what>Culprit rank \d{1,7}; Error type: .{1,2000})",
        HINT,
        "fr_trace: {what}",
    ),
    _row(
        "NCCL WARN",
        r"NCCL WARN (?P<what>.{1,200})",
        HINT,
        "NCCL: {what}",
    ),
    _row(
        "SIGSEGV|SIGBUS|SIGILL|SIGFPE",
        r"^(?:\(\w[^)]{0,160}\) )?\W{0,20}(?P<what>SIG(?:SEGV|BUS|ILL|FPE)) received",
        HINT,
        "{what} received",
    ),
    _row(
        "@",
        r"^.{0,60}?@ +0x[0-9a-f]+ +(?:\(?\w+\)? +)?(?P<what>nccl\w{1,80})\(",
        HINT,
        "its native stack is in {what}",
        follows=True,
    ),
)

_WHOLE = tuple(row for row in ROWS if row.is_whole)
FINISHED = next(row.pattern for row in ROWS if row.reader == "finished")


def is_whole(text: str) -> bool:
    """Whether a row matches all that a terminal may have wrapped of the line."""
    return any(row.pattern.search(text) for row in _WHOLE)


def _filter() -> tuple[bytes, ...]:
    """Before the rows' words: what begins a rank's line, ours, a traceback, or a message that a
    terminal has wrapped.
    """
    words = {
        *("nemo_patches ", "[rank", "[Rank", "rank      :", "world_rank=", "pid "),
        *("Traceback (most", "Error", "EI00", "NCCL", "ollective", "watchdog"),
        *("arrier", "sigkill_handler", "imed out", "ncoder", "ll_reduce", "ll_gather"),
        *encoder_prints.WORDS_OF_AN_END,
        *(word for row in ROWS if not row.follows for word in row.words),
        *hearsay_lines.WORDS,
        *table_lines.WORDS_OF_A_HEAD,
    }
    shortest = [one for one in words if not any(two in one for two in words - {one})]
    return tuple(word.encode() for word in sorted(shortest))


# Each line of interest has one of these, or closely follows a line that has one.
FILTER = _filter()
# Or one of these, which most logs are spared looking for.
FILTER_BEYOND_ASCII = tuple(word.encode() for word in hearsay_lines.IN_CHINESE)
