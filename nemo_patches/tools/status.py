"""`nemo-patches status`:
on, off here, or cannot be; found for this environment without importing NeMo or torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from rich.console import Console

import nemo_patches
from nemo_patches.patching import DISABLE_VARIABLE, admission, released_source, start_up
from nemo_patches.patching.admission import CANNOT_BE as CANNOT_BE
from nemo_patches.patching.admission import OFF
from nemo_patches.patching.admission import ON as ON
from nemo_patches.patching.metric_targets import METRIC_SUMS, METRIC_TARGETS
from nemo_patches.patching.targets import CHECKPOINT_TARGETS, TARGETS, Target
from nemo_patches.sync.settings import (
    ALL_SETTINGS,
    DEFERRED,
    STOCK,
    Settings,
    SettingsError,
)
from nemo_patches.tools.refusals import refusals

DEFAULT = "default"
_DISABLED_HERE = f"off, {DISABLE_VARIABLE}=1"  # auto-apply would be on without it


JSON_FORMAT = 1  # rises where a field changes its meaning, or goes


class StatusError(Exception):
    """NeMo cannot be examined. The text says why."""


class NotInstalled(StatusError):
    """NeMo or torch is not there."""


@dataclass(frozen=True)
class SettingReport:
    """One setting, and where it comes from: its variable, or DEFAULT."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class TargetReport:
    """Whether one target can be patched.

    file: empty where this NeMo does not have it. left: why there is nothing to patch; empty where
    NeMo's reduce is.
    problem: why it cannot be patched although it should be; empty if it can.
    """

    target: str
    file: str
    left: str
    problem: str

    def text(self, state: str) -> str:
        if self.problem or not self.file:
            return self.problem or "this NeMo does not have it"
        fits = {ON: "patched when it is imported", OFF: "can be patched; off here"}.get(
            state, "left as it is"
        )
        return self.left or fits


@dataclass(frozen=True)
class EnvironmentStatus:
    """What `nemo-patches status` prints.

    chained: the sitecustomize that auto-apply runs after its own; empty where there is none.
    reasons: why not all would be patched; empty where all would.
    misspelt: a sentence for each variable that looks like a setting and is none.
    state: ON, OFF or CANNOT_BE. answer: the state in a sentence, with what switches it on.
    """

    versions: Mapping[str, str]
    settings: tuple[SettingReport, ...]
    targets: tuple[TargetReport, ...]
    auto_apply: str
    chained: str
    reasons: tuple[str, ...]
    misspelt: tuple[str, ...] = ()
    state: str = ON
    answer: str = ""


@dataclass(frozen=True)
class _Chosen:
    """The targets that a setting adds to the encoders'. problems: why they stay as in stock,
    although chosen.
    """

    title: str = ""
    targets: tuple[TargetReport, ...] = ()
    problems: tuple[str, ...] = ()


def examine() -> EnvironmentStatus:
    """Look at the environment of this process. Raises StatusError where NeMo or torch cannot be
    examined.
    """
    nemo = _nemo_version()
    encoders = tuple(map(_target, TARGETS))
    present = [target for target in encoders if target.file]
    left = (
        tuple(dict.fromkeys(target.left for target in present))
        if all(target.left for target in present)
        else ()
    )
    settings = _resolved()
    metrics = _metrics() if settings.metrics == DEFERRED else _Chosen()
    callback = _checkpoint_callback() if settings.checkpoints != STOCK else _Chosen()
    auto_apply, shadowed_by = _auto_apply()
    switched_off = (
        [f"{DISABLE_VARIABLE}=1"] if os.environ.get(DISABLE_VARIABLE) == "1" else []
    )
    switched_off = [] if left else [*switched_off, *filter(None, [shadowed_by])]
    problems = [target.problem for target in encoders if target.problem]
    if not left:
        problems += [*_refusals(nemo), *_missing(nemo, encoders)]
    reasons = [*problems, *metrics.problems, *callback.problems, *switched_off]
    as_stock = " and ".join(
        chosen.title for chosen in (metrics, callback) if chosen.problems
    )
    state = (
        CANNOT_BE
        if problems
        else ON
        if left or (auto_apply == "on" and not switched_off)
        else OFF
    )
    return EnvironmentStatus(
        versions={
            "nemo_patches": nemo_patches.__version__,
            "nemo": nemo,
            "torch": _version_of("torch"),
            "python": platform.python_version(),
        },
        settings=tuple(_settings()),
        targets=(*encoders, *callback.targets, *metrics.targets),
        auto_apply=auto_apply,
        chained=getattr(sys.modules.get("sitecustomize"), "__file__", None) or "",
        reasons=tuple(reasons),
        misspelt=tuple(admission.misspelt()),
        state=state,
        answer=_answer(state, left, auto_apply, reasons, as_stock),
    )


def _nemo_version() -> str:
    for name in ("nemo", "torch"):
        if importlib.util.find_spec(name) is None:
            raise NotInstalled(
                f"{name} is not installed for {sys.executable}; try the Python of your"
                " training job"
            )
    try:
        return admission.nemo_version()
    except Exception as error:  # a folder of that name, or a broken installation
        raise StatusError(
            f"nemo: no version can be read: {type(error).__name__}: {error}"
        ) from error


def _metrics() -> _Chosen:
    targets = tuple(map(_metric_target, METRIC_TARGETS))
    sums = map(_metric_target, METRIC_SUMS)
    problems = dict.fromkeys(
        target.problem for target in (*targets, *sums) if target.problem
    )
    return _Chosen("the metrics", targets, tuple(problems))


def _checkpoint_callback() -> _Chosen:
    targets = tuple(map(_target, CHECKPOINT_TARGETS))
    return _Chosen(
        "the checkpoint callback",
        targets,
        tuple(target.problem for target in targets if target.problem),
    )


def _refusals(nemo: str) -> Iterator[str]:
    """Why apply() would raise."""
    try:
        admission.is_disabled()
    except SettingsError as error:
        yield str(error)
    yield from map(str, refusals())
    try:
        admission.require_supported(nemo)
    except (SettingsError, admission.UnsupportedNeMo) as error:
        yield str(error)


def _missing(nemo: str, encoders: Iterable[TargetReport]) -> Iterator[str]:
    if not any(target.file for target in encoders):
        if not os.path.isdir(_folder_of("nemo")):
            raise StatusError(
                f"NeMo {nemo} is at {_folder_of('nemo')}, which is no folder: its code"
                " cannot be looked at; unpack it"
            )
        yield (
            f"NeMo {nemo} at {_folder_of('nemo')} has none of the classes that would be"
            " patched"
        )
    if importlib.util.find_spec("wrapt") is None:
        yield "wrapt is not installed: pip install wrapt"


def as_json(content: Mapping[str, object]) -> str:
    """For programs; docs/auto-apply.md has the fields."""
    return dumps({"format": JSON_FORMAT, **content}, indent=2)


def show(report: EnvironmentStatus, console: Console) -> None:
    """Print it for a person, the answer first."""
    lines = [report.answer, *(report.misspelt), ""]
    # A NeMo that needs no patch is on by itself; what else can be patched is not.
    state = OFF if report.state == ON and report.auto_apply != "on" else report.state
    lines += (f"{target.target}: {target.text(state)}" for target in report.targets)
    lines.append(f"auto-apply: {report.auto_apply}")
    lines.append(
        f"sitecustomize that auto-apply runs after its own: {report.chained or 'none'}"
    )
    changed = [setting for setting in report.settings if setting.source != DEFAULT]
    lines += (f"{one.name}: {one.value} ({one.source})" for one in changed)
    if not changed:
        lines.append("settings: the defaults")
    lines.append(
        ", ".join(f"{name} {version}" for name, version in report.versions.items())
    )
    lines.append(f"supported: NeMo {admission.SUPPORTED}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _answer(
    state: str,
    left: tuple[str, ...],
    auto_apply: str,
    reasons: list[str],
    as_stock: str,
) -> str:
    """The first line; then each reason on a line of its own.

    left: why there is nothing to patch. as_stock: what stays as in stock, although chosen.
    """
    if state == CANNOT_BE:
        return "\n  ".join(["cannot be patched; NeMo runs as stock here:", *reasons])
    if state == ON:
        how = ", ".join(left) or "every Python process here patches NeMo at its import"
        how += (
            "; a class of yours with a length sync of its own is not seen here: the job"
            " names it"
        )
        return "\n  ".join(
            [
                f"on: {how}"
                + (f", but {as_stock}: as in stock NeMo" if as_stock else ""),
                *reasons,
            ]
        )
    ways = (
        "`nemo-patches run -- COMMAND`, PYTHONPATH=/path/to/nemo-patches, or nemo_patches.apply()"
        " in the training script"
    )
    if f"{DISABLE_VARIABLE}=1" not in reasons:
        switch = f"{ways} (which this command cannot see)"
    else:
        switch = f"unset {DISABLE_VARIABLE}" + (
            "" if auto_apply == _DISABLED_HERE else f", then {ways}"
        )
    return "\n  ".join(
        [
            "off: this NeMo can be patched, and nothing here does it",
            *reasons,
            f"to switch it on: {switch}",
        ]
    )


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH, or built in place
        return "of unknown version"


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return next(iter(spec.submodule_search_locations or ()), "?") if spec else "?"


def _target(target: Target) -> TargetReport:
    file = target.source_file()
    try:
        left = released_source.nothing_to_bound(target, file) if file else ""
        problem = released_source.drift(target, file) if file and not left else ""
        return TargetReport(str(target), str(file or ""), left, problem)
    except (OSError, SyntaxError, ValueError) as error:
        raise StatusError(f"{file}: {error}") from error


def _resolved() -> Settings:
    try:
        return Settings.resolve()
    except SettingsError:  # _refusals() has it
        return Settings()


def _metric_target(target: Target) -> TargetReport:
    """Like an encoder's; but metrics=deferred needs every target of its own."""
    report = _target(target)
    return (
        report
        if report.file
        else replace(report, problem=f"{target}: this NeMo has no {target.module}")
    )


def _settings() -> Iterable[SettingReport]:
    for setting in ALL_SETTINGS:
        variable, value = setting.source_and_value(None, os.environ)
        if value is None:
            yield SettingReport(setting.name, setting.text(setting.default), DEFAULT)
        else:  # as it was written, unless it is empty
            yield SettingReport(
                setting.name, str(value or setting.text(value)), variable
            )


def _auto_apply() -> tuple[str, str]:
    """Whether the import hook is installed in this process; and why not, if PYTHONPATH asks for it
    (else empty).
    """
    if start_up.is_installed():
        return "on", ""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    files = (Path(folder, "sitecustomize.py").absolute() for folder in folders)
    ours = next(filter(_is_ours, files), None)
    if ours is None:
        return (
            (
                "off here; `nemo-patches run -- COMMAND` or PYTHONPATH=/path/to/nemo-patches"
                " switches it on"
            ),
            "",
        )
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return _DISABLED_HERE, ""
    first = getattr(sys.modules.get("sitecustomize"), "__file__", "something else")
    return (
        "off",
        f"{ours} is on PYTHONPATH, but {first} comes first and does not run it",
    )


def _is_ours(file: Path) -> bool:
    """Whether the file is the sitecustomize.py of a checkout or of `nemo-patches run`, also of
    another copy.
    """
    start_ups = (
        file.parent / "nemo_patches" / "patching" / "start_up.py",
        file.parent.parent / "start_up.py",
    )
    return file.is_file() and any(start_up.is_file() for start_up in start_ups)
