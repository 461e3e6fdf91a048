"""`nemo-patches status`: says what would be patched in this environment, without importing NeMo or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

import nemo_patches
from nemo_patches.patching import DISABLE_VARIABLE, admission, start_up
from nemo_patches.patching.targets import METRIC_SUMS, METRIC_TARGETS, TARGETS, Target
from nemo_patches.stall import settings as stall_settings
from nemo_patches.sync import settings as sync_settings
from nemo_patches.sync.settings import SettingsError
from nemo_patches.tracing import settings as trace_settings
from nemo_patches.uneven import settings as uneven_settings


class StatusError(Exception):
    """NeMo or torch cannot be examined. The text says why."""


@dataclass(frozen=True)
class SettingReport:
    """One setting, and where it comes from: its variable, or "default"."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class TargetReport:
    """Whether one target would be patched.

    file: empty where this NeMo does not have it. built_in: one of the diffs has been applied, so nothing is to be done.
    problem: why it would not be patched although it should be; empty if it would.
    """

    target: str
    file: str
    built_in: bool
    problem: str

    def __str__(self) -> str:
        if self.problem or not self.file:
            return self.problem or "this NeMo does not have it"
        return "built in by a diff" if self.built_in else "would be patched"


@dataclass(frozen=True)
class Report:
    """What `nemo-patches status` prints.

    chained: the sitecustomize that auto-apply runs after its own; empty where there is none.
    reasons: why not all would be patched; empty where all would.
    misspelt: a sentence for each variable that looks like a setting and is none.
    """

    versions: Mapping[str, str]
    settings: tuple[SettingReport, ...]
    targets: tuple[TargetReport, ...]
    auto_apply: str
    chained: str
    reasons: tuple[str, ...]
    misspelt: tuple[str, ...] = ()


def examine() -> Report:
    """Look at the environment of this process. Raises StatusError where NeMo or torch is not there."""
    for name in ("nemo", "torch"):
        if importlib.util.find_spec(name) is None:
            raise StatusError(f"{name} is not installed for {sys.executable}")
    targets = tuple(map(_target, TARGETS))
    reasons = [target.problem for target in targets if target.problem]
    if _defers_metrics():
        targets += (deferring := tuple(_metric_target(target, targets) for target in METRIC_TARGETS))
        sums = (_metric_target(target, targets) for target in METRIC_SUMS)
        reasons += dict.fromkeys(target.problem for target in (*deferring, *sums) if target.problem)
    auto_apply, shadowed_by = _auto_apply()
    checks: list[Callable[[], object]] = [
        _require_enabled,
        sync_settings.resolve,
        stall_settings.resolve,
        trace_settings.resolve,
        uneven_settings.resolve,
    ]
    if not any(target.built_in for target in targets):  # what is built in asks for no version
        checks.append(_require_supported)
    for check in checks:
        try:
            check()
        except (SettingsError, admission.UnsupportedNeMo, _Disabled) as error:
            reasons.append(str(error))
    if shadowed_by:
        reasons.append(shadowed_by)
    if importlib.util.find_spec("wrapt") is None:
        reasons.append("wrapt is not installed")
    chained = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    return Report(
        versions={
            "nemo_patches": nemo_patches.__version__,
            "nemo": admission.nemo_version(),
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
        },
        settings=tuple(_settings()),
        targets=targets,
        auto_apply=auto_apply,
        chained=chained or "",
        reasons=tuple(reasons),
        misspelt=tuple(admission.misspelt()),
    )


def show(report: Report, console: Console) -> None:
    """Print it for a person."""
    lines = [", ".join(f"{name} {version}" for name, version in report.versions.items())]
    lines.append(f"supported: NeMo {admission.SUPPORTED}")
    lines += (f"{setting.name}: {setting.value} ({setting.source})" for setting in report.settings)
    lines += (f"{target.target}: {target}" for target in report.targets)
    lines.append(f"auto-apply: {report.auto_apply}")
    lines.append(f"sitecustomize that auto-apply runs after its own: {report.chained or 'none'}")
    lines.append("not all would be patched:" if report.reasons else "all is patched, or would be")
    lines += (f"  {reason}" for reason in report.reasons)
    lines += report.misspelt
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


class _Disabled(Exception):
    """Everything is switched off."""


def _require_enabled() -> None:
    if admission.disabled():
        raise _Disabled(f"{DISABLE_VARIABLE}=1")


def _require_supported() -> None:
    admission.require_supported(admission.nemo_version())


def _target(target: Target) -> TargetReport:
    file = target.source_file()
    try:
        built_in = file is not None and target.built_into_source(file)
        problem = target.drift_of_source(file) if file and not built_in else ""
        return TargetReport(str(target), str(file or ""), built_in, problem)
    except (OSError, SyntaxError, ValueError) as error:
        raise StatusError(f"{file}: {error}") from error


def _defers_metrics() -> bool:
    try:
        return uneven_settings.resolve().metrics == uneven_settings.DEFERRED
    except SettingsError:  # a reason of its own
        return False


def _metric_target(target: Target, encoders: Iterable[TargetReport]) -> TargetReport:
    """As one of an encoder; metrics=deferred needs every one of its own, and is in no diff."""
    if any(encoder.built_in for encoder in encoders):
        return TargetReport(str(target), "", False, "metrics=deferred is not in the diffs, which this NeMo has")
    report = _target(target)
    return report if report.file else replace(report, problem=f"{target}: this NeMo has no {target.module}")


def _settings() -> Iterable[SettingReport]:
    for setting in uneven_settings.ALL_SETTINGS:
        value = os.environ.get(setting.variable)
        default = setting.text(setting.default)
        if value == "" and setting is trace_settings.DUMP:
            yield SettingReport(setting.name, setting.text(value), setting.variable)
        else:
            yield SettingReport(setting.name, value or default, setting.variable if value else "default")


def _auto_apply() -> tuple[str, str]:
    """Whether the import hook is installed in this process; and why not, if PYTHONPATH asks for it (else empty)."""
    if start_up.installed():
        return "on", ""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    files = (Path(folder, "sitecustomize.py").absolute() for folder in folders)
    ours = next(filter(_is_ours, files), None)
    if ours is None:
        return "off here; `nemo-patches run -- COMMAND` or PYTHONPATH=<checkout> switches it on", ""
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return f"off, {DISABLE_VARIABLE}=1", ""
    first = getattr(sys.modules.get("sitecustomize"), "__file__", "something else")
    return "off", f"{ours} is on PYTHONPATH, but {first} comes first and does not run it"


def _is_ours(file: Path) -> bool:
    """Whether the file is the sitecustomize.py of a checkout or of `nemo-patches run`, also of another copy."""
    start_ups = (file.parent / "nemo_patches" / "patching" / "start_up.py", file.parent.parent / "start_up.py")
    return file.is_file() and any(start_up.is_file() for start_up in start_ups)
