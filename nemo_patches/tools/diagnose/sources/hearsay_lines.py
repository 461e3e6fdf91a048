"""What general words tell of a rank, in lines that no row of the table knows: hearsay.

A line accuses where a program says, of now, that a rank is not there or has died. It only mentions
a rank where it is no line of a log (help, a configuration, code, a test's name), where it tells of
what may be, will be or was, where it asks, denies or counts. What is told is over where the rank is
heard of again, or the job goes on. It is quoted, and accuses nobody, where other lines follow it
and nothing bears it out. The rules stand in this order below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.conditions import TOLD_ABSENT, TOLD_APART, TOLD_DEAD
from nemo_patches.tools.diagnose.rank_end import error_in
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition
from nemo_patches.tools.diagnose.sources.exception_lines import kind_of
from nemo_patches.tools.diagnose.sources.lines import (
    ANY_DIGIT,
    MOST_KEPT,
    RANK_LIST,
    TEXTS,
    Line,
    ranks_in,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.table_lines import A_HANG, TableLines

A_NAME = "a name"
# Where the job's size is not known: larger numbers are process ids.
_MOST_RANK = 1 << 12
_MOST_PROCESSES = 64
_LONGEST_QUOTE = 200  # characters
# What a logger of C++ writes before a message: where in its source that is
_OF_SOURCE = re.compile(r"^.{0,300}?\w\.(?:cc|cpp|cu|h):\d{1,6}\] (?=\S)")
_MOST_STEPS_AFTER = 1  # a rank that has gone stops the others within a step

# Who, its number, words that change neither who nor whether, what became of it, and no word after
# that which makes it something else: "missing optional dependency".
_NAMES = (
    r"[Rr]ank|RANK|[Ww]orker|[Pp]rocess|[Tt]ask|[Nn]ode|[Rr]eplica|[Tt]rainer|[Ll]earner|"
    r"[Pp]eer|[Mm]ember"
)
_WHO = (
    r"(?<![A-Za-z])(?P<pod>[\w.]-|[Pp]od (?:\S{1,80}/)?|[Ll]ocal[ _-]?|[Nn]ode[ _-])?"
    rf"(?P<who>{_NAMES})s?"
)
_NUMBER = (
    r"(?: ?[#:=_-] ?| (?:id|no\.?|number|index)[ :=]{1,2}| )?\[?"
    rf"(?P<ranks>{RANK_LIST})\b\]?(?![\d.:]*\d)"
)
_BETWEEN = (
    r"(?:'s)?(?:[\s,:;=-]{0,4}(?:[(\[][^()\[\]]{0,80}[)\]]|/ ?\d{1,6}|pid[ =:]\d{1,9}|of \d{1,6}\b|"
    r"(?i:(?:on|at) (?:node |host |gpu )?[\w.:/-]{1,80}|(?:process|worker|actor|pod|container|"
    r"trainer|training|job|task|rank|gpu|device|main|progress|forward|backward|node|host|python|"
    r"subprocess|child|state|status|is|are|was|were|been|has|have|had|it|its|seems?|appears?|to|"
    r"be|may|might|still|now|also|just|already|suddenly|likely|probably|possibly|marked|set|"
    r"declared|considered|reported|as|makes|made|shows|sends|sent|"
    r"got|became|went|completely|timed out:?|error|the|and)\b)))"
    r"{0,8}[\s,:;=()-]{0,4}"
)
_AFTER = (
    r"(?=\s*$|\.(?!\w)|,(?![A-Za-z])|\s*[;!()\[\]|\"'\\]|\s*[:-]\s|\s+(?:for|since|after|in|on|from|with|while|during|"
    r"and|due|of|via|suddenly|unexpectedly|by(?! user| request| design)|"
    r"at (?:the |step|barrier|epoch|iter|batch|all|\d{1,9}|')|to (?:the |ping|health|heartbeat))\b|"
    r"\s+at (?:barrier|')|\s\d{1,9} ?s\b)"
)
_NO_COUNT = r"(?!\s{0,2}[:=]\s{0,2}\d|\s\d{1,9}(?! ?(?:s|sec\w*|m|min\w*|h)\b))"
_BY_OTHERS = r"(?:signal )?(?:15|2|SIGTERM|SIGINT)\b"
_DIED = (
    rf"(?!(?:died|killed|dead|aborted|failed) (?:with|by|on|from|due to) {_BY_OTHERS})(?:"
    r"crashed|died|dead|segfault(?:ed)?|[Ss]egmentation fault|core dumped|"
    r"aborted|failed|panicked|preempted|evicted|"
    r"(?<!is )killed(?=\s*$|[\s(]*(?:by|with|due|signal|SIG|[Oo][Oo][Mm]))|OOM[ -]?[Kk]illed|"
    r"(?:exited|terminated|ended|finished) (?:unexpectedly|abnormally|prematurely|early)|"
    r"(?:(?:exited|terminated|died|killed|ended) (?:with|by|on|from) |received |got )"
    rf"(?:(?!{_BY_OTHERS})signal \w{{1,12}}|SIG(?:KILL|SEGV|BUS|ABRT|ILL|FPE)))"
)
_EXITED = (
    r"(?:(?:exit(?:ed)?|return(?:ed)?|terminated|finished)\W{1,3}(?:with |a |status |non-?zero )*"
    r"(?:exit ?|return ?)?(?:code|status)|exit[ _]?code|returncode|rc|exited)"
    r"[^\w-]{1,3}(?!(?:-15|-2|143|130)\b)-?[1-9]\d{0,2}\b(?!/)|"  # whom others ended
    r"(?:returned|exited|ended|finished)[^\w-]{1,3}-(?!(?:15|2)\b)\d{1,2}\b"
)
_ABSENT = (
    r"missing|absent|stale|stalled|stuck|hung|hanging|frozen|wedged|unresponsive|not responding|"
    r"does not respond|(?:no|without) (?:heartbeat|response|progress|answer|reply)|"
    r"missed (?:its |a |the )?heartbeats?|"
    r"heartbeat (?:lost|missed|timeout|timed out|expired)|lost contact|is lost|unreachable|"
    r"left the (?:group|job)|disconnected|disappeared|vanished|gone|offline|"
    r"stopped (?:sending|responding|reporting)(?: heartbeats?)?|"
    r"(?:did not|didn't|ha(?:s|ve) not|hasn't|never|not|failed to) "
    r"(?:report|respond|arrive|join|check|reach|enter|send|come|answer|show)(?:ed|d)?"
    r"(?: (?:in|up|back|the|it|its|a|any|heartbeat|status|barrier|rendezvous|group|"
    r"collective)){0,3}|"
    r"silent"
)
_STATE = (
    "[Mm]issing|[Aa]bsent|[Ss]talled|[Uu]nresponsive|[Dd]ead|[Ss]tuck|[Hh]ung|"
    "[Ll]agging|[Ll]ost|[Pp]roblematic|[Ff]aulty|[Oo]ffending"
)
_LIST = (
    r"[\[({]{0,2}\s?(?P<ranks>(?P<r>r(?:ank)?[ _-]?)?"
    rf"{RANK_LIST}(?:,? \d{{1,6}}(?=[ ,\d]{{0,2000}}[\])}}])){{0,400}})\b"
    r"(?P<closed>\s?[\])}])?"
)
_WHO_IN_CHINESE = f"(?P<who>)(?:{_NAMES}|进程|节点" + ")"
_SAME_CLAUSE = r"[^\uff0c\u3002\uff1b,;]"
_DIED_IN_CHINESE = "崩溃|异常退出|已退出|被杀|被终止|挂掉|死亡"
_ABSENT_IN_CHINESE = (
    "未到|未响应|未加入|无响应|没有到|没有响应|没有心跳|没有加入|"
    "卡住|卡死|失联|掉线|心跳超时"
)
_GENERAL = (
    (
        TOLD_DEAD,
        rf"{_WHO}{_NUMBER}{_BETWEEN}\b(?:(?:{_DIED}){_NO_COUNT}{_AFTER}|{_EXITED})",
    ),
    (TOLD_ABSENT, rf"{_WHO}{_NUMBER}{_BETWEEN}\b(?:{_ABSENT}){_NO_COUNT}{_AFTER}"),
    (
        TOLD_ABSENT,
        # "lost workers: 0", "stalled ranks 2 of 8": how many
        rf"\b(?:{_STATE}) (?!\w+s\b[ #:=_-]{{0,3}}\d{{1,6}}\b(?!,? ?-?\d|\]))"
        rf"(?!\w+\W{{1,3}}\d+ of \d){_WHO}{_NUMBER}{_NO_COUNT}",
    ),
    (
        TOLD_ABSENT,
        r"\b(?:[Nn]o (?:heartbeat|response|answer|reply|message|update|progress|signal|data|"
        r"result|report|sign|batch|gradients?) |"
        r"[Nn]othing (?:heard |received )?|[Tt]imed? ?out (?:while )?waiting |"
        r"(?:[Gg]ave|[Gg]iving) up (?:waiting )?|"
        r"[Ll]ost (?:the )?(?:connection|contact|heartbeat) )"
        r"(?:from|of|by|for|on|to|with) "
        rf"(?:the |(?<=waiting for )(?:[^\s(]{{1,20}} ){{0,3}}\(?)?{_WHO}{_NUMBER}",
    ),
    (
        TOLD_ABSENT,
        rf"\b(?:[Cc]onnection|[Hh]eartbeats?) (?:to|with|from|of|for) {_WHO}{_NUMBER}{_BETWEEN}"
        r"\b(?:lost|closed|reset|broken|dropped|missed|missing|expired|timed out|overdue|"
        r"stopped)\b",
    ),
    (
        TOLD_ABSENT,
        rf"\b[Mm]issing (?:the )?(?:\w+ ){{1,2}}(?:of|from|for) {_WHO}{_NUMBER}",
    ),
    (  # of a monitor's label
        TOLD_ABSENT,
        r"[\[(]\w{0,40}?(?P<who>[Rr]ank|[Ww]orker)\w{0,20}[:=#_ -](?P<ranks>\d{1,6})"
        r"(?:@[\w.-]{1,80})?[\])]\W{0,3}(?i:did not|didn't|has not) (?:get|receive|see|hear)\b",
    ),
    (  # of a name, which is no rank's
        TOLD_ABSENT,
        r"\b(?:[Nn]ode|[Hh]ost|[Aa]gent|[Pp]od) ['\"]?(?P<who>[\w.-]*[A-Za-z][\w.-]*)"
        r"(?P<ranks>)['\"]?(?: (?:on|at) (?:host |node )?[\w.-]{1,80})?:? (?:has |is |was )?"
        r"(?:failed to send|missed|lost|not responding|unreachable|unresponsive|"
        r"stopped responding|did not respond|declared dead|NODE_ERROR|"
        r"(?:failed|did not pass) (?:the |its )?(?:\w{1,20}[ _-]){0,2}(?:check|test)|"
        r"(?:\w{1,20}[ _-]){1,3}(?:check|test)s? (?:has |have )?failed)\b",
    ),
    (
        TOLD_ABSENT,
        r"\b[Nn]o heartbeats? (?:from|for|of) (?P<who>\w[^.]{0,80})(?P<ranks>)",
    ),
    *(
        (kind, pattern)
        for kind, words in (
            (TOLD_DEAD, _DIED_IN_CHINESE),
            (TOLD_ABSENT, _ABSENT_IN_CHINESE),
        )
        for pattern in (
            rf"{_WHO_IN_CHINESE}{_NUMBER}{_SAME_CLAUSE}{{0,12}}?(?:{words})",
            rf"(?:{words}){_SAME_CLAUSE}{{0,8}}?[:\uff1a]?\s?{_WHO_IN_CHINESE}s?{_NUMBER}",
        )
    ),
)
_RULES_BEYOND_ASCII = tuple((kind, re.compile(one, re.ASCII)) for kind, one in _GENERAL)
_RULES = tuple(
    (kind, one) for kind, one in _RULES_BEYOND_ASCII if one.pattern.isascii()
)
# An error in one line: "rank 2: OSError: ...", "error on rank 2: ..."
_LEVEL = r"(?:(?:error|fatal|critical|exception|failed)\W{1,4})?"
_ERROR = re.compile(
    rf"{_WHO}{_NUMBER}[\s,:;|\])-]{{1,4}}(?i:{_LEVEL})"
    r"(?P<error>(?:\w{1,40}\.){0,8}\w{0,80}(?:Error|Exception)\b.*|CUDA (?:error|out of memory).*)|"
    r"\b(?i:error|exception|failure|crash|oom|out of memory) (?:on|in|at|from) "
    rf"(?:global |the )?{(_WHO + _NUMBER).replace('?P<', '?P<at_')}(?P<rest>.*)"
)
_OF_ERRORS = ("rror", "ERROR", "xcep", "CUDA", "ailure", "rash", "OOM", "oom", "emory")
# In a line of a log that names one rank alone, such words may stand anywhere.
_ONE_RANK = re.compile(
    r"(?<![A-Za-z/_-])(?<!ocal )(?<!ode )(?:[Gg]lobal |mpi_)?(?P<who>[Rr]ank|RANK)"
    r"(?: ?[#:=_-] ?| )?(?P<ranks>\d{1,6})\b(?![\d.:]*\d)"
)
_ANYWHERE = (
    (
        TOLD_DEAD,
        re.compile(
            rf"\b(?!{_BY_OTHERS})(?:signal \d{{1,2}}\b|SIG(?:KILL|SEGV|BUS|ILL|FPE|ABRT)\b|"
            r"core dumped|[Ss]egmentation fault|segfault|crashed\b|died\b|OOM\b|"
            r"exit(?:ed)?(?: with)? (?:code|status)[ :=]{1,3}(?!0|143|130|-15|-2\b)-?\d)"
        ),
    ),
    (
        TOLD_ABSENT,
        re.compile(
            r"\b(?:D state|state T|no heartbeat|unresponsive|not respond\w*|hung|stuck|"
            r"deadlocked|stalled|frozen|left the (?:group|job)|fell off|"
            r"(?:never|did not|has not) (?:arrive|come|came|"
            r"join|respond|report|set|answer|deliver)\w*|"
            r"(?:did|has|have) not \w+\b.{0,40} for \d{2,9} ?(?:s|sec\w*|m|min\w*))\b"
        ),
    ),
)
# Who has come and who has not, as barriers and monitors list them.
_NOT_COME = re.compile(
    rf"\b(?i:(?:{_STATE}|"
    r"(?:(?:did |do |have |has )?not|never) (?:arrived?|join(?:ed)?|ready|come|present|"
    r"respond(?:ed|ing)?|report(?:ed)?)|"
    r"outstanding|offline|timed[ -]out|waiting (?:for|on)))"
    rf"(?P<names>['\"]?[ _-](?:{_NAMES})s?(?: names| ids)?)?"
    rf"(?: at [\w'.-]{{1,40}})?['\"]?\s?[:=]\s?{_LIST}"
)
_TASK = re.compile(r"(?:/[\w.-]{1,40}:[\w.-]{1,40}){0,4}/[a-z]{1,20}:(?=\d)")
_HAS_COME = re.compile(
    r"\b(?i:arrived|present|joined|ready|reached|responded|checked[ -]in|received(?: from)?|seen|"
    rf"alive|entered)(?:[ _-](?:{_NAMES})s?)?['\"]?\s?[:=]\s?{_LIST}"
)
_MEETING = re.compile(
    r"(?i)\b(?:barrier|rendezvous|collective|all_?reduce|all_?gather)\b"
)
_WHOSE_LISTS = re.compile(rf"(?<![A-Za-z])(?:{_NAMES})s?(?![a-z])")

# What says so of the ranks in the lines that follow it, and such a line
_HEADER = re.compile(
    rf"(?i)(?<![a-z])(?:{_STATE}|timed out|(?:did|have|has|had) not|failed to|never|waiting for)\b"
    r".{0,80}:$"
)
_OF_HEADER = re.compile(
    rf"^\W{{0,8}}(?:\S{{0,80}}/)?(?:(?:{_NAMES})s?[ :#=_-]{{0,2}})?"
    rf"(?P<ranks>{RANK_LIST})(?=[^\w.]|$)"
)

# An event of a cluster's pod or node
_OF_CLUSTER = re.compile(
    r"\b(?:\d/\d +(?:Pending|Unknown|\w+BackOff|Err\w*Pull|ContainerCreating|"
    r"Init:\S+)(?= +\d)|(?:down|drain\w{0,3}|alloc\w*)(?=\*)|"
    r"Evict(?:ed|ing|ion(?:By\w+)?)|Preempt(?:ed|ing|ionBy\w+)|OOMKilled|TaintManagerEviction|NotReady|"
    r"Node(?:NotReady|Lost|Failure|Shutdown)|[Nn]ode \S{1,80} "
    r"(?:is |was |became |has |went )?(?:down|drained|failed|unresponsive|unreachable)|"
    r"\w*Spot\w*(?:Termination|Interruption)|"
    r"instances?\W(?:was |is |were )?(?:preempted|reclaimed))\b"
)
# A monitor's event of a rank, in JSON
_EVENT = re.compile(
    r"(?:\[rank\d{1,7}\]: )?(?:rank|worker|process)_(lost|dead|died|crashed|failed|stalled|hung|"
    r"missing|unresponsive|disconnected)$"
)

# What follows a comma is of the same.
_SENTENCES = re.compile(r"(?<=[.!?;])\s+(?=\S)")
# Patterns whose names end in _LOWER are for text in small letters: that is twice as fast.
# 1. What is no line of a log: an option's help, an item of a list, a comment, a shell's trace,
# code, a test's name or result, what stands indented.
_NO_LOG_LINE = re.compile(
    r"^\s*(?:-{1,2}[A-Za-z][\w-]*[ ,=]|[-*] |\d{1,2}\. |usage:|#|//|\+{1,4} |\$ |echo\b|>>> |"
    r"(?:export )?[A-Z][A-Z0-9_]*=|\|.*\|\s*$|"
    r"(?:[Ff]ix(?:e[sd])?|[Aa]dd(?:s|ed)?|[Cc]hanged?|[Rr]emoved?|feat|test|docs|perf)"
    r"(?:\([\w/-]+\))?!?:)|^(?:\s{2,}|\t)"
    r"(?!.*\d\d:\d\d|(?:Normal|Warning)\s{2})"  # kubectl's events
)
_CODE = re.compile(
    r"\s#\s|::\w|\b(?:PASSED|XFAIL|SKIPPED)\b|\btest_\w|\b(?:raise|assert|return|def|elif) |"
    r"\b[a-z_.]+\(f?[rb]?['\"]|\bf['\"]"
)
# One of these is in each such.
_OF_CODE = (
    *("#", "::", "PASSED", "XFAIL", "SKIPPED", "test_", "'", '"'),
    *("raise ", "assert ", "return ", "def ", "elif "),
)
_OF_TESTS = re.compile(r"\S\.py::\w|::\w.* (?:PASSED|FAILED|SKIPPED|XFAIL|ERROR)\b")
# 2. Of another subject: data loaders, threads, a model's keys, the texts of a speech model.
_OF_OTHERS_LOWER = re.compile(
    r"data ?loader|missing keys?|thread|nemo_patches |"
    r"\b(?:my|your|our|you|we|i (?:am|was|had|have|saw|think|did|got|killed))\b|\blora\b|"
    r"matri(?:x|ces)|singular|prun(?:ed|ing)|\btaint|^(?:srun|slurmstepd|prterun|mpirun)\b|"
    r"\b(?:reference|predicted|prediction|pred_text|hypothesis|hyp|ref|transcript\w*|utterance|"
    r"sentence|prompt|answer)\b\W{0,3}[:=]|\"text\":|"
    r"\b(?:sample|hypothesis|reference|utterance) \d"
)
# 3. What somebody sees to, or has ended well.
_SEEN_TO_LOWER = re.compile(
    r"recover|re-?start|respawn|relaunch|replac|ignor|succe|gracefully|cleanly|\bok\b|"
    r"\bretry|healthy|no longer|re-?join|reconnect|\(([1-9])/(?!\1\b)\d\)|dry.?run|"
    r"simulat|inject|pretend|chaos|drill|skipp|"
    r"self-?test|on purpose|, expected|\bresolved|as (?:expected|asked|planned|intended)"
)
# 4. Of a clause, up to what is told: what may be or will be, is asked or denied, is a reason of
# something else, was before, is quoted.
_MOOD_LOWER = re.compile(
    r"\b(?:if|unless|whether|tip|hint|example|e\.g|would|will|should|shall|could|can|going to|"
    r"about to|so that|as soon as|what|why|how|is(?= \w+ \d)|does|did|suppose\w*|assum\w+|"
    r"because|since|once|when\w*|in case|after(?! \d)|before|until|"
    r"no|not|none|nobody|never|neither|nor|without|isn't|wasn't|"
    r"previous\w*|earlier|resum\w*|last (?:run|time|attempt|week|night|month|year)|yesterday|"
    r"(?:in|of|during) (?:run|attempt) \d|sometimes|often|usually|"
    r"polic\w+|default)\b|"
    "如果|是否|可能|将会|之前|"
    r"\b(?:not|never|no)_|['\"](?:the )?$|\b(?:at|(?<!due )to|by) (?:the )?$|"
    r"\b(?!process|worker|actor|container|loader|agent|trainer|heartbeat)\w+ of (?:the )?$"
)
# Likewise after it, or between.
_MOOD_AFTER_LOWER = re.compile(
    r"\?|\b(?:in (?:run|attempt) \d|in \d{1,6} of \d|yesterday|"
    r"last (?:run|time|attempt|week|night|month|year)|"
    r"(?:if|unless|until|when) |by default|\(config\)|\(default)"
)
# 5. An entry of a configuration: beside other such ones, and without a time or a level.
_ENTRY = re.compile(
    r"^\s*(?:- )?['\"]?[A-Za-z][\w.-]{0,60}['\"]?\s?[:=](?:\s*$|\s{1,4}(?:[\[{'\"].*|[\w./+-]+,?$))"
)
_PROSE = re.compile(
    r"^\s*(?:- )?['\"]?(?P<key>[A-Za-z][\w.-]{0,60})['\"]?:\s{1,4}['\"]\S+ "
)
_IS_WRITTEN = re.compile(
    r"\d\d:\d\d|\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b|^\[[^\]]+\]"
)
_WRITER = re.compile(r"\*\*\* |[\w./#@-]{2,40}(?:\[\d{1,9}\])?: ")
# What tells that a rank is there again, that all are, or that the job goes on.
_BACK = re.compile(
    rf"{_WHO}{_NUMBER}{_BETWEEN}\b(?:back|alive|up|healthy|recovered|reconnected|responding|"
    r"re-?joined|returned|restarted|resumed|responded|arrived|reported|answered|came)\b"
)
_OF_BACK = (
    *("back", "alive", " up", "healthy", "recover", "reconnect", "respond", "joined"),
    *("returned", "restart", "resumed", "arrived", "reported", "answered", "came"),
)
_ALL_BACK = re.compile(
    rf"(?i:\ball (?:\d{{1,6}} )?(?:{_NAMES})s? (?:are |have |is )?"
    r"(?:now |again )?(?:respond|alive|healthy|back|present|up\b|ready|joined|ok\b|recovered)|"
    r"\b(?:rendezvous|barrier)\b.{0,40}\b(?:complete|done|passed|released))"
)
_STEP = re.compile(
    r"(?i)\b(?:global_?step|step|iter(?:ation)?|batch|update|epoch)\b\W{0,3}(\d{1,9})\b"
)
# A line after it that bears it out: the job ends, or somebody gives up.
_BEARS_OUT_LOWER = re.compile(
    r"(?<![a-z])(?:abort\w*|terminat\w*|(?:giv(?:e|ing)|gave) up|timed out|fatal|killing|"
    r"killed|stopping|stop (?:all|the|others)|job[ _]stop\w*|cancel\w*|traceback|"
    r"(?:shut\w*|tear\w*) (?:\w+ )?down|clean(?:ing|ed)? up|"
    r"(?:job|run|training|launch) (?:\d{1,9} |has |is )?(?:failed|dead|over)\b|"
    r"(?:exit|return) (?:status|code)\W{1,3}[1-9]|sig(?:term|kill|int|abrt)\b|"
    r"(?:exited|returned)\b.{0,20}-\d)|终止|退出"
)
# One that tells that the ranks are started anew, or that all is well
_ANEW_LOWER = re.compile(
    r"\b(?:re-?)?(?:start|launch|spawn|join|boot|schedul)(?:s|ed|ing)?\b|"
    r"\b(?:resum|recover|replac|succe|continu)|\b(?:healthy|ready|passed|completed)\b|"
    "恢复|重启|继续"
)
# One that may stand behind a hang: of waiting, of errors, of stacks.
_OF_A_HANG_LOWER = re.compile(
    r"(?<![a-z])(?:wait\w*|barrier|collective|all_?\w{6}|nccl\w*|still|error|critical|"
    r"fail\w*|hang\w*|stuck|dump\w*|stacks?|(?:current )?thread)(?![a-z])|"
    r"等待|错误|^[\s@|+#*]|^(?:frame #|Process \d)"
)
# Words of which one is in each such line, in place of a row's.
WORDS = (
    *("issing", "talled", "tuck", "hung", "is hanging", "respond", "nresponsive"),
    *("roblematic", "aulty", "ffending"),
    *("heartbeat", "lost ", "Lost ", "agging", "crash", "died", "dead", "Dead"),
    *("killed", "exit", "turn code", "returncode", " rc=", " rc:", "segfault"),
    *("core dumped", "aborted", "unreachable", "did not ", "never ", "has not "),
    *("have not ", "no progress", "returned -", "keep-alive", "SIG"),
    *("silent", "terminated ", "unexpectedly", "abnormally", "bsent", "failed"),
    *("frozen", "disconnected", "imed out", "othing ", "evicted", "preempted"),
    *("imeout waiting", "with status", "signal ", " D state", "left the "),
    *("no step", "stall", " hang"),
    *(
        "Spot",
        "reclaimed",
        "Evict",
        "Preempt",
        "NotReady",
        "NodeLost",
        "NodeShut",
        "OOMKilled",
        "drained",
        "is down",
        "Pending ",
        "down*",
        "BackOff ",
        "Creating ",
    ),
    *("iving up", "gave up", "Error", "rror on", "xception on", "stale", "state T"),
)
IN_CHINESE = (
    *("未", "崩溃", "退出", "被", "无响应"),
    *("没有", "卡", "失联", "掉线", "超时"),
)


# A time-out or an end that a row knows: the job stands, or is over.
_ENDS = (
    *(conditions.WAITED, conditions.CUT, conditions.STUCK, conditions.HEARD),
    *(conditions.RAISED, conditions.KILLED, conditions.FAILED, conditions.ABORTED),
    *(conditions.NODE, conditions.MISSING),
)


class _Told(NamedTuple):
    """at: how many lines had been weighed when it was told last. needs: without which it does not
    count: A_HANG of the job, or A_NAME of a pod or a host whose rank lines tell.
    """

    kind: str
    line: Line
    at: int
    needs: str


class _After:
    """The last lines of one file that weigh what was told before them, by their count."""

    def __init__(self) -> None:
        self.of_others = 0  # the log goes on, of something else
        self.decided = 0
        self.is_borne_out = False  # by the line that decided

    def leaves_in_doubt(self, at: int) -> bool:
        if self.decided > at:
            return not self.is_borne_out
        return self.of_others > at


class Steps:
    """Whether the job has gone on since something was told, by the steps that lines tell."""

    def __init__(self) -> None:
        self._seen: list[list[int]] = []

    def begin(self) -> None:
        self._seen.clear()

    def go_on(self, text: str) -> bool:
        numbers = [int(number) for number in _STEP.findall(text)]  # epoch and step
        if numbers and (not self._seen or numbers > self._seen[-1]):
            self._seen.append(numbers)
        return len(self._seen) > _MOST_STEPS_AFTER


class HearsayLines:
    """One launch's lines."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._reports = 0  # of others, so far, of who had not come
        self._told: dict[tuple[int, str], _Told] = {}  # by rank and text
        self._before = ""  # the text of the line before
        self._in_what = False  # the line before is of a C++ exception's words
        self._file = ""  # the present one: others' lines may be earlier or later
        self._steps = Steps()  # since the last that was told
        self._header: Line | None = None  # that the lines before followed
        self.tables = TableLines(found, _state_of, self._tell, self.is_there)
        self._weighed = 0  # lines
        self._after: dict[str, _After] = {}  # by file

    def take(self, line: Line, is_known: bool) -> None:
        """is_known: a row has read it, so only what it tells of the job's going on counts."""
        if line.file != self._file:
            self.tables.end_file()
            self._file = line.file
            self._steps.begin()
        is_row = self.tables.take(line)
        if line.text.isupper():
            line = line._replace(text=line.text.lower())
        is_more = line.text[:1] in ("\t", " ")
        self._in_what = "what():" in self._before or (self._in_what and is_more)
        if self._in_what and is_more:  # of an exception of C++, not of a list
            line = line._replace(text=line.text.strip())
        text, before = line.text, self._before
        self._before = text
        self._take_back(text)
        is_told = is_known or is_row or self._take_listed(line)
        is_told = is_told or self._take_words(line, before)
        self._header = self._header if is_told and not is_known else None
        if text.endswith(":") and _WHOSE_LISTS.search(text):
            self._note_header(line, before)
        if self._told and not is_told:
            self._weigh(line)

    def _note_header(self, line: Line, before: str) -> None:
        header = _HEADER.search(line.text)
        mood = header and _MOOD_LOWER.search(line.text.lower(), 0, header.start())
        if header and not mood and not _is_no_report(line.text, before):
            self._header = line

    def _take_words(self, line: Line, before: str) -> bool:
        """Whether they tell of a rank."""
        text = line.text
        if line.has_prefix and (event := _EVENT.match(text)):
            self._tell([line.rank], _state_of(event[1]), line)
            return True
        if not _has_words(text.translate(ANY_DIGIT)):
            return False
        if not _is_no_report(text, before):
            for ranks, kind in _told_in(line, self._found.world_size):
                self._tell(ranks, kind, line)
                return True
        # Also a cell of a table; who took its place is no news.
        what = text.strip("| ").partition(" by ")[0]
        if _OF_CLUSTER.search(what) and not _is_no_report(what, before):
            self._tell([NOT_TOLD], TOLD_DEAD, line._replace(text=what), A_NAME)
            return True
        return False

    def _take_listed(self, line: Line) -> bool:
        """Whether the line is one of those that a header's word is told of."""
        listed = _OF_HEADER.match(line.text) if self._header else None
        if self._header is None or listed is None:
            self._header = None
            return False
        text = f"{self._header.text.strip()} {line.text.strip()}"
        told = self._header._replace(text=text)
        self._tell(ranks_in(listed["ranks"]), TOLD_ABSENT, told)
        return True

    def _tell(self, ranks: list[int], kind: str, line: Line, needs: str = "") -> None:
        self._steps.begin()
        for rank in ranks:
            key = (rank, kind if rank != NOT_TOLD else line.text)
            if len(self._told) < MOST_KEPT or key in self._told:
                first = self._told.get(key, _Told(kind, line, 0, needs))
                needs = min(needs, first.needs)
                self._told[key] = first._replace(at=self._weighed, needs=needs)

    def _take_back(self, text: str) -> None:
        if self._found.reports_made > self._reports:
            self._reports = self._found.reports_made
            self._steps.begin()
        elif not self._told and not self._reports:
            return
        if "NodeReady" in text:
            self._drop(lambda told: told.needs == A_NAME)
        if _ALL_BACK.search(text):
            self._goes_on()
        elif any(one in text for one in _OF_BACK) and (back := _BACK.search(text)):
            self.is_there(*ranks_in(back["ranks"]))
        if self._steps.go_on(text):
            self._goes_on()

    def _weigh(self, line: Line) -> None:
        """What a line that tells of no rank says of those that were told before."""
        text = line.text.lower()
        is_anew = _ANEW_LOWER.search(text) is not None
        is_borne_out = bool(_BEARS_OUT_LOWER.search(text)) and not is_no_log_line(
            line.text
        )
        if is_borne_out == is_anew:  # both, or of something else
            step = _STEP.search(text)
            is_neutral = not text or (step and not step[0].startswith("epoch"))
            if is_anew or is_neutral or _OF_A_HANG_LOWER.search(text):
                return
        self._weighed += 1
        after = self._after.setdefault(line.file, _After())
        if is_borne_out or is_anew:
            after.decided, after.is_borne_out = self._weighed, is_borne_out
        else:
            after.of_others = self._weighed

    def _goes_on(self) -> None:
        self._drop(lambda told: True)
        self._steps.begin()
        if self._reports:
            self._found.leave_out_reports()

    def _drop(self, which: Callable[[_Told], bool]) -> None:
        """Of what the present file has told."""
        for key, told in [*self._told.items()]:
            if told.line.file == self._file and which(told):
                del self._told[key]

    def is_there(self, *ranks: int) -> None:
        """Said to be absent, and heard of after that."""
        for rank in ranks:
            for kind in (TOLD_ABSENT, TOLD_APART, conditions.STOPPED):
                told = self._told.get((rank, kind))
                if told is not None and told.line.file == self._file:
                    del self._told[rank, kind]

    def finish(self, is_finished: bool) -> None:
        """is_finished: training has come to its end, so nobody is missing."""
        self.tables.finish()
        if is_finished:
            self._told.clear()
            self._goes_on()
        has_ended = not self._found.kinds.isdisjoint(_ENDS)
        for (rank, _), told in self._told.items():
            if told.needs == A_NAME:
                self._found.explain_node(told.line)
            named = self._found.ranks_named(told.line.text)
            if told.needs == A_HANG and not has_ended:
                continue
            text = told.line.text.strip()
            if len(text) > _LONGEST_QUOTE:
                text = _OF_SOURCE.sub("", text)
            text = text[:_LONGEST_QUOTE]
            condition = Condition(told.kind, text)
            if told.needs == A_NAME and not named:
                condition = Condition(conditions.HINT, text)
            after = self._after.get(told.line.file)
            if told.kind == conditions.STOPPED:  # by the kernel
                after = None
            if not has_ended and after and after.leaves_in_doubt(told.at):
                quoted = f'the log goes on after "{text}"'
                condition = Condition(conditions.HINT, quoted)
            self._found.add(rank, condition, told.line, own=False)


@lru_cache(1 << 9)
def _has_words(shape: str) -> bool:
    words = WORDS if shape.isascii() else WORDS + IN_CHINESE
    return any(word in shape for word in words)


def is_no_event(text: str, before: str) -> bool:
    """Whether the line may hold any log's line, and tells of nothing: a test's name, the prose of a
    configuration.
    """
    if "::" in text and _OF_TESTS.search(text):
        return True
    entry = _PROSE.match(text) if '"' in text or "'" in text else None
    is_text = entry is not None and TEXTS.fullmatch(entry["key"])
    return entry is not None and not is_text and _is_entry(text, before)


def is_no_log_line(text: str) -> bool:
    if _NO_LOG_LINE.match(text):
        return True
    return any(one in text for one in _OF_CODE) and _CODE.search(text) is not None


def _is_no_report(text: str, before: str) -> bool:
    return bool(
        _is_of_others(text.translate(ANY_DIGIT))
        or _SEEN_TO_LOWER.search(text.lower())
        or _is_entry(text, before)
    )


@lru_cache(1 << 9)
def _is_of_others(shape: str) -> bool:
    return is_no_log_line(shape) or _OF_OTHERS_LOWER.search(shape.lower()) is not None


def _is_entry(text: str, before: str) -> bool:
    """Whether the line stands in a configuration: keys differ, and none has a time or a level."""
    if not _ENTRY.match(before) or _IS_WRITTEN.search(text + before):
        return False
    return before.partition(":")[0].strip() != text.partition(":")[0].strip()


def _told_in(line: Line, size: int) -> Iterator[tuple[list[int], str]]:
    """The ranks and the condition that the first clause with any tells."""
    text = line.text
    if listed := _in_lists(text, size):
        yield listed, TOLD_ABSENT
        return
    for clause in _SENTENCES.split(text):
        for kind, pattern in _RULES if text.isascii() else _RULES_BEYOND_ASCII:
            if (told := pattern.search(clause)) and _is_told_of_now(clause, told):
                yield _ranks_of(told.groupdict(), text, size), kind
                return
        # A rank's own errors have a reader of their own.
        may_be_error = not line.has_prefix and any(one in clause for one in _OF_ERRORS)
        error = _ERROR.search(clause) if may_be_error else None
        if error and (ranks := _with_error(error, text, size)):
            yield ranks, TOLD_DEAD
            return
        if not line.has_prefix and (kind := _told_anywhere(clause, text)):
            yield ranks_in(_ONE_RANK.findall(clause)[0][1]), kind
            return


def ranks_named_in(text: str) -> set[int]:
    return {int(ranks) for _, ranks in _ONE_RANK.findall(text)}


def _told_anywhere(clause: str, text: str) -> str:
    """What a written line's clause tells of the one rank that it names."""
    is_written = _IS_WRITTEN.search(text) or _WRITER.match(text)
    if not is_written or len(set(_ONE_RANK.findall(clause))) != 1:
        return ""
    for kind, pattern in _ANYWHERE:
        if (told := pattern.search(clause)) is None:
            continue
        rest = (clause[: told.start()] + clause[told.end() :]).lower()
        if not _MOOD_LOWER.search(rest) and not _MOOD_AFTER_LOWER.search(rest):
            return kind
    return ""


def _with_error(found: re.Match[str], text: str, size: int) -> list[int]:
    """None where it waited for others."""
    told = {
        name.removeprefix("at_"): one for name, one in found.groupdict().items() if one
    }
    error = error_in((told.get("error") or told.get("rest", "")).lstrip(" :,-"))
    before = found.string[: found.start()].lower()
    is_other = kind_of(error)[0] != conditions.RAISED or _MOOD_LOWER.search(before)
    return [] if is_other else _ranks_of(told, text, size)


def _state_of(cell: str) -> str:
    """The condition that a cell of a table names."""
    if re.fullmatch(_DIED, cell.lower()):
        return TOLD_DEAD
    return TOLD_ABSENT if re.fullmatch(f"{_ABSENT}|lost", cell.lower()) else ""


def _is_told_of_now(clause: str, told: re.Match[str]) -> bool:
    return not (
        _MOOD_LOWER.search(clause[: told.start()].lower())
        or _MOOD_AFTER_LOWER.search(clause[told.start("who") :].lower())
    )


def _ranks_of(told: Mapping[str, str | None], text: str, size: int) -> list[int]:
    """NOT_TOLD where the number is of a node, a pod, or larger than any rank's."""
    who = (told["who"] or "").lower()
    most = size or (_MOST_PROCESSES if who == "process" else _MOST_RANK)
    ranks = ranks_in(told["ranks"] or "")
    is_rank = (
        who != "node" and told.get("pod") is None and -1 < min(ranks, default=-1) < most
    )
    return ranks if is_rank else [NOT_TOLD]


def _in_lists(text: str, size: int) -> list[int]:
    """Who has not come, by lists of a line; a number alone is a count, unless a list of who has
    come stands beside it.
    """
    text = _TASK.sub("", text)
    absent = _NOT_COME.search(text)
    if absent is None:
        return []
    come = _HAS_COME.search(text)
    is_of_ranks = come or absent["names"] or absent["r"] or _WHOSE_LISTS.search(text)
    if not is_of_ranks and not (absent["closed"] and _MEETING.search(text)):
        return []
    ranks = ranks_in(absent["ranks"])
    is_name = absent["closed"] or absent["r"] or come is not None
    if len(ranks) == 1 and not is_name:
        return []
    if come is not None and not set(ranks).isdisjoint(ranks_in(come["ranks"])):
        return []
    if _MOOD_LOWER.search(text[: absent.start()].lower()) or "?" in text:
        return []
    return ranks
