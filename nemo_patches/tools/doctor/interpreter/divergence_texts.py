"""What is said of ranks that part: sentences.yaml has a sentence for each kind, and its rule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemo_patches.tools.doctor.finding import NOTE, WARNING, RuleFinding, Severity, at
from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.divergences import Divergence, Kind
from nemo_patches.tools.doctor.interpreter.skeleton import BACKWARD, ENCODER, BlockEnd
from nemo_patches.tools.doctor.yaml_text import LOADER

_MOST_NAMED = 3  # collectives of a finding
_EMPTY = re.compile(r"not \(?[\w.]+\b|len\([\w.]+\)|[\w.]+ is (not )?None$")


@dataclass(frozen=True)
class Sentence:
    """what: with the fields of a divergence in it, and its `names` and their verb `are`."""

    rule: str
    what: str
    instead: str


_SENTENCES = {
    name: Sentence(**row)
    for name, row in yaml.load(
        Path(__file__).with_name("sentences.yaml").read_text("utf-8"), Loader=LOADER
    ).items()
}


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
    name = each.kind.name
    if each.by_rank and f"{name} BY RANK" in _SENTENCES:
        name = f"{name} BY RANK"
    elif each.kind is Kind.BRANCH and each.collectives[0].pairs_with == ENCODER:
        name = "ENCODER"
    elif each.kind is Kind.LOOP and each.cause == each.collectives[0].name:
        name = "GENERATE"
    return _SENTENCES[name]


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
