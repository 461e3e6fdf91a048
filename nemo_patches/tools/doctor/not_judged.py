"""What the rules could not judge: values that were not read, and the rules that one of their
possible values concerns.

Each value that is not known is taken as what it may be, one after the other, and every rule is
checked on that: those that find something then, and not now, are named. So a value that decides
nothing is never spoken of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_patches.tools.doctor import encoders, known_keys
from nemo_patches.tools.doctor.config import Config, Value
from nemo_patches.tools.doctor.finding import NOTE, Findings, note, warning
from nemo_patches.tools.doctor.inputs import DATA_TYPES
from nemo_patches.tools.doctor.interpolations import UNKNOWN
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.suppressions import Pair
from nemo_patches.tools.doctor.trees import Keys

RULE = "NP005"
_NOT_ASSUMED = (
    "NP0",
    "NP101",
    "NP120",
)  # on reading, on each encoder there is, on how keys are written
_MOST = 100  # assumptions
_MOST_NAMED = 3  # manifests

_MAY_BE: dict[str, list[Any]] = known_keys.TABLE["may_be"]
_STREAM, _SHARED_OUT, _ = _MAY_BE["input_cfg"]
_PATHS = (
    "manifest_filepath",
    "tarred_audio_filepaths",
    "shar_path",
)  # one that a variable gives is there
_ENCODER = "nemo.collections.asr.modules.ConformerEncoder"

Check = Callable[[Job], Iterable[Pair]]


@dataclass(frozen=True)
class _Unknown:
    """One value that was not read, and why; what it may be. open: it is still to be given, or
    differs by machine.
    """

    value: Value
    why: str
    may_be: tuple[tuple[Keys, Any], ...]
    open: bool = False
    instead: str = (
        "a value that the doctor can read, or an override with one (key=value)"
    )


def findings(job: Job, check: Check) -> Findings:
    """One for each value that is not known and concerns a rule. check: what the chosen rules find
    in a job.
    """
    found = _serious(check(job))
    left = _MOST
    unknowns: dict[str, _Unknown] = {}
    for each in _unknown(job):
        unknowns.setdefault(each.value.key, each)
    for unknown in unknowns.values():
        rules: set[str] = set()
        for keys, assumed in unknown.may_be if left > 0 else ():
            left -= 1
            other = Job(job.config.assuming(keys, assumed), job.settings)
            rules |= {rule for rule, _ in _serious(check(other)) - found}
        if unknown.value in (
            job.devices,
            job.nodes,
        ):  # which every sentence on ranks names
            rules -= {rule for rule, _ in found}
        if rules:
            what = f"not judged: {', '.join(sorted(rules))}: {unknown.why}"
            make = note if unknown.open else warning
            yield make(what, unknown.value, unknown.instead)
    yield from _no_manifest(job)
    yield from _no_trainer(job)


def _serious(pairs: Iterable[Pair]) -> set[tuple[str, str]]:
    return {
        (rule.identifier, finding.what)
        for rule, finding in pairs
        if finding.severity > NOTE and not rule.identifier.startswith(_NOT_ASSUMED)
    }


def _unknown(job: Job) -> Iterator[_Unknown]:
    config = job.config
    for keys, unread in config.unread.items():
        if unread.refused:
            continue  # NP130
        yield _Unknown(
            config.get(keys),
            f"{'.'.join(keys)} is in another file: {unread.why}",
            tuple((keys, each) for each in _MAY_BE["input_cfg"]),
            instead=(
                "start the doctor in the folder and on a machine where NeMo finds that"
                " file"
            ),
        )
    for keys, section in config.mappings():
        for key, value in section.items():
            if value is UNKNOWN and key in _MAY_BE:
                yield from _of(config, config.get((*keys, key)), _MAY_BE[key])
        if "input_cfg" in keys[-2:-1]:
            yield from _of_type(config, keys)
    if job.several and not job.ranks:
        value = (
            job.devices
            if not isinstance(job.nodes.value, int) or job.devices.value != 1
            else job.nodes
        )
        sizes = tuple((("trainer", "devices"), count) for count in (7, 64))
        yield _Unknown(
            value, f"the number of ranks is not known, by {value.key}", sizes, open=True
        )
    for target in encoders.unknown_in(config):
        if not str(target.value).startswith("nemo."):
            why = (
                f"{target.key} is a class of your own, and may be a ConformerEncoder"
                " with another name"
            )
            yield _Unknown(
                target, why, ((target.keys, _ENCODER),), instead=f"_target_: {_ENCODER}"
            )


def _of(config: Config, value: Value, may_be: Sequence[Any]) -> Iterator[_Unknown]:
    keys = value.keys
    by_machine = any(
        keys[:depth] in config.of_machine for depth in range(1, len(keys) + 1)
    )
    if by_machine and keys[-1] in _PATHS:
        return
    why = (
        f"{value.key} is what the job's machine makes of it"
        if by_machine
        else f"{value.key} is still to be given"
    )
    yield _Unknown(
        value, why, tuple((keys, each) for each in may_be), open=not by_machine
    )


def _of_type(config: Config, keys: Keys) -> Iterator[_Unknown]:
    """A type of input that NeMo does not have: of your own code, or of another NeMo."""
    name = config.get((*keys, "type"))
    if isinstance(name.value, str) and name.value not in DATA_TYPES:
        why = f"{name.key}: {name.value} is no type of input of NeMo 2.1 to 3.0"
        yield _Unknown(
            name,
            why,
            tuple((keys, entry) for entry in (*_STREAM, *_SHARED_OUT)),
            instead="one of NeMo's",
        )


def _no_manifest(job: Job) -> Findings:
    """A note on sets whose entries would be counted if their manifest were here."""
    if not job.has_trainer:
        return
    dropping = [
        dataset
        for dataset in job.datasets
        if dataset.tarred is False and dataset.get("drop_last", False).on
    ]
    manifests = [dataset.get("manifest_filepath") for dataset in dropping]
    away = [
        each
        for each in manifests
        if isinstance(each.value, str) and not os.path.isfile(each.value)
    ]
    if away:
        more = f" and {len(away) - _MOST_NAMED} more" if len(away) > _MOST_NAMED else ""
        names = ", ".join(str(each.value) for each in away[:_MOST_NAMED])
        what = f"not judged: NP125: no file on this machine: {names}{more}"
        yield note(
            what,
            tuple(away[:_MOST_NAMED]),
            "on a machine with the data, entries are counted",
        )


def _no_trainer(job: Job) -> Findings:
    section = job.get("trainer")
    if section.given and not job.has_trainer:
        what = (
            f"not judged: every rule on ranks: {section.key} does not say how"
            " Lightning's Trainer is made"
        )
        yield note(what, job.get("trainer._target_"), "trainer: with Trainer's keys")
