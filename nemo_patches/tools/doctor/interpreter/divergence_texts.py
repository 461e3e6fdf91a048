"""What is said of ranks that part: one sentence for each kind, and the rule that it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_patches.tools.doctor.finding import NOTE, WARNING, RuleFinding, Severity, at
from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.divergences import Divergence, Kind
from nemo_patches.tools.doctor.interpreter.skeleton import BACKWARD, ENCODER, BlockEnd

_MOST_NAMED = 3  # collectives of a finding
_EMPTY = re.compile(r"not \(?[\w.]+\b|len\([\w.]+\)|[\w.]+ is (not )?None$")


@dataclass(frozen=True)
class Sentence:
    """what: with the fields of a divergence in it, and its `names` and their verb `are`."""

    rule: str
    what: str
    instead: str


_SENTENCES = {
    Kind.BRANCH: Sentence(
        "NP401",
        "{names} {depend} on `{cause}`: a rank where that is otherwise leaves the others"
        " waiting",
        "the collective in any case, or a test that all ranks share",
    ),
    Kind.ORDER: Sentence(
        "NP401",
        "{names} come in another order where `{cause}`: ranks where that differs make"
        " unlike ones",
        "one order on all ranks",
    ),
    Kind.NAME: Sentence(
        "NP401",
        "{names} {are} made under a name that depends on `{cause}`: ranks with unlike"
        " names reduce unlike values, or wait",
        "names that all ranks log, each of them",
    ),
    Kind.FIRST_RANK: Sentence(
        "NP401",
        "{names} {are} made on one rank of the job or of a node only, by {cause}",
        "the collective in a method that every rank runs",
    ),
    Kind.EXIT: Sentence(
        "NP405",
        "`{exit}` in line {exit_line}, by `{cause}`, leaves out {names}: ranks where that"
        " differs wait in it",
        "a decision that all ranks share: all_reduce a flag, and leave where any rank has"
        " it",
    ),
    Kind.ERROR: Sentence(
        "NP406",
        "after {cause} a rank goes on with other collectives than the ranks without it"
        " ({names}), and they wait for each other",
        "raise in the handler, or a decision to skip that all ranks share, before the next"
        " collective",
    ),
    Kind.GRADIENTS: Sentence(
        "NP401",
        "{names} {are} of one module where `{cause}`, and of another elsewhere: ranks where that"
        " differs reduce unlike gradients",
        "one choice for all ranks: from the step's number, or broadcast from rank 0",
    ),
    Kind.MESSAGE: Sentence(
        "NP413",
        "{names}: {cause}",
        "a recv for each send, on the rank that it goes to; isend or batch_isend_irecv, or an"
        " order by rank % 2, in a ring",
    ),
    Kind.HOOK: Sentence(
        "NP406",
        "{names} {are} made in {cause}, which runs on {hook}",
        "what a rank does alone, such as torch.save to a file of its own",
    ),
    Kind.LOOP: Sentence(
        "NP407",
        "{names} {are} made in each turn of a loop over `{cause}`: ranks whose batches give"
        " another number of turns wait for each other",
        "as many turns on all ranks: all_reduce their number with MAX, and fill up with"
        " padding",
    ),
    Kind.LOCK: Sentence(
        "NP401",
        "{names} {are} made while a rank holds the lock of line {line}: it waits for the others,"
        " and they for the lock",
        "the collective behind the lock",
    ),
    Kind.SET: Sentence(
        "NP401",
        "{names} {are} made in the order of a set (line {line}), which is another one in each"
        " process: ranks make unlike ones",
        "sorted(..)",
    ),
    Kind.THREAD: Sentence(
        "NP401",
        "{names} {are} handed to another thread: it comes between this one's collectives of"
        " the same group, on each rank at another place",
        "a group of its own for the thread (process_group=), or async_save",
    ),
    Kind.SIZES: Sentence(
        "NP413",
        "{names} takes as much from each rank as this rank's own data say, of which the others"
        " know nothing: they send what theirs say",
        "the sizes exchanged before, by an all_to_all_single of their own",
    ),
    Kind.ALARM: Sentence(
        "NP411",
        "the alarm of line {line} does not end {names}: Python runs the handler of a signal"
        " only after the call into C++ has returned, which waits as long as without it",
        "a timeout of the process group (init_process_group(timeout=..)), or nemo_patches",
    ),
}
_BY_RANK = {
    Kind.BRANCH: Sentence(
        "NP401",
        "{names} {are} made only where a test on the rank holds (`{cause}`), and nowhere"
        " else here",
        "the collective outside of that branch, on every rank",
    ),
    Kind.EXIT: Sentence(
        "NP405",
        "`{exit}` in line {exit_line}, by `{cause}`, leaves out {names}: the other ranks"
        " wait in it",
        "the collective before it, on every rank",
    ),
}
_OF_ENCODER = Sentence(
    "NP401",
    "{names} {are} called only if `{cause}`: ranks where that differs wait for each other"
    " in it",
    "the call in any case, and its result left out",
)
_OF_GENERATE = Sentence(
    "NP407",
    "{names} ends on each rank by itself: a rank whose sequences end first leaves the"
    " others waiting",
    "synced_gpus=True",
)


def finding(each: Divergence) -> tuple[str, RuleFinding]:
    """The rule's identifier, and its finding."""
    sentence = _sentence(each)
    one = len({made.name for made in each.collectives}) == 1
    said = sentence.what.format(
        names=_names(each),
        are="is" if one else "are",
        depend="depends" if one else "depend",
        cause=each.cause,
        exit=each.exit,
        exit_line=each.exit_line,
        line=each.line,
        hook=knowledge.HOOKS.get(each.cause),
    )
    guess = _guess(each)
    made = [at(made.name, made.line) for made in each.collectives]
    read = made if each.kind is Kind.MESSAGE else [*made, at(each.cause, each.line)]
    if each.kind is Kind.EXIT:
        read = [at(each.exit, each.exit_line), *read]
    elif each.kind is Kind.ERROR:
        read = [at(f"except {each.cause}", each.line), *made]
    return sentence.rule, RuleFinding(
        severity=NOTE if guess else _severity(each),
        what=f"{each.function}: {said}{guess}",
        read=tuple(read),
        instead=sentence.instead,
    )


def _sentence(each: Divergence) -> Sentence:
    if each.by_rank and each.kind in _BY_RANK:
        return _BY_RANK[each.kind]
    if each.kind is Kind.BRANCH and each.collectives[0].pairs_with == ENCODER:
        return _OF_ENCODER
    if each.kind is Kind.LOOP and each.cause == each.collectives[0].name:
        return _OF_GENERATE
    return _SENTENCES[each.kind]


def _names(each: Divergence) -> str:
    """The collectives, and what makes one alone a collective, where its name does not say so."""
    names = list(dict.fromkeys(made.name for made in each.collectives))
    why = each.collectives[0].why
    if len(names) == 1:
        return f"{names[0]} ({why})" if why else names[0]
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _guess(each: Divergence) -> str:
    """What must hold for a guess to be right, at the end of a sentence; empty where it is none."""
    guesses = [made.guess for made in each.collectives]
    said = f"{each.cause} {each.about}"
    # That a batch may be None.
    expected = each.function.endswith("_step") or each.exit == BlockEnd.CONTINUE.value
    if re.search(knowledge.NO_GRADIENT, said):
        expected = each.trains
    expected = bool(expected and re.search(knowledge.NO_BATCH, said))
    tests = knowledge.OF_WRAPPERS
    if not (each.by_rank or each.sure or expected):
        tests = {**tests, **knowledge.GUESSES}
    known = [text for words, text in tests.items() if re.search(words, said)]
    guesses = known or guesses
    return f". A guess: {guesses[0]}" if all(guesses) else ""


def _severity(each: Divergence) -> Severity:
    """A note where only gradients are reduced, which no_sync may have put off, and at the end of an
    evaluation, where the turns are its batches and only a rank without any would leave.
    """
    backward = [made.pairs_with == BACKWARD for made in each.collectives]
    at_end = each.function.endswith("_end")
    if each.kind is Kind.LOOP:
        guessed = [made.guess for made in each.collectives]
        only = all(one or guess for one, guess in zip(backward, guessed, strict=True))
        return NOTE if (only and not each.sure) or at_end else WARNING
    empty = each.kind in (Kind.EXIT, Kind.BRANCH) and not each.by_rank
    empty = empty and bool(_EMPTY.match(each.cause))
    return NOTE if empty and at_end and not any(backward) and not each.sure else WARNING
