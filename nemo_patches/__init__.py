"""Training NVIDIA NeMo speech models on several ranks without hanging in the encoder's length sync.

`apply()`, `revert()` and `status()` are the whole interface. Importing this package imports neither torch nor NeMo.
"""

# Every Python process under auto-apply imports this file at start-up: it imports nothing, not even typing or
# __future__, and its syntax is that of any Python 3.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Literal

    from nemo_patches.patching.monkeypatch import Status

__version__ = "0.1.0"
__all__ = ["apply", "revert", "status"]


def apply(
    sync: "Literal['bounded', 'overlapped', 'local'] | None" = None,
    timeout: "float | None" = None,
    on_timeout: "Literal['fallback', 'raise'] | None" = None,
    call_timeout: "float | None" = None,
    trace: "str | os.PathLike[str] | None" = None,
    trace_size: "float | None" = None,
    trace_checks: "str | Sequence[str] | None" = None,
    on_finding: "Literal['continue', 'raise'] | None" = None,
) -> None:
    """Patch NeMo's length syncs in this process; a second call only changes the settings, and says so.

    sync: "bounded" (default) waits for the other ranks at most `timeout`; "overlapped" never waits; "local" does not
        communicate. timeout: seconds (default 10), for the wait of one encoder call. on_timeout: "fallback" (default)
        goes on with this rank's own length; "raise" raises LengthSyncTimeout. call_timeout: seconds (default 60, 0:
        never); an encoder call that lasts longer has all threads' stacks logged, once, and is not interrupted.
    trace: a folder; every rank records its encoder calls there (docs/trace.md), for `nemo-patches diagnose`. "": no
        trace. trace_size: MiB that each rank may write (default 256). trace_checks: "inputs", "cuda", "barrier", or
        several, with commas. on_finding: "continue" (default); "raise" raises a finding out of the encoder call.
    What is not given comes from NEMO_PATCHES_SYNC, NEMO_PATCHES_TIMEOUT, NEMO_PATCHES_ON_TIMEOUT,
    NEMO_PATCHES_CALL_TIMEOUT, NEMO_PATCHES_TRACE, NEMO_PATCHES_TRACE_SIZE, NEMO_PATCHES_TRACE_CHECKS and
    NEMO_PATCHES_ON_FINDING, then the default.
    With NEMO_PATCHES_DISABLE=1 nothing is patched, which is said.

    Raises SettingsError (a ValueError) for a value that is not allowed, UnsupportedNeMo for a NeMo outside the
    supported range, DriftError where NeMo's code is not as expected (nothing is patched then), ModuleNotFoundError
    where NeMo is not installed.
    """
    from nemo_patches.sync.settings import resolve
    from nemo_patches.tracing.settings import resolve as resolve_trace

    settings = resolve(sync, timeout, on_timeout, call_timeout)
    trace_settings = resolve_trace(trace, trace_size, trace_checks, on_finding)
    from nemo_patches.patching import monkeypatch

    monkeypatch.apply(settings, trace_settings)


def revert() -> None:
    """Restore every patched attribute of NeMo to the very object it was; training goes on as stock."""
    from nemo_patches.patching import monkeypatch

    monkeypatch.revert()


def status() -> "Status":
    """What is patched, what was skipped and why, the settings, and what each encoder's sync has done on this rank."""
    from nemo_patches.patching import monkeypatch

    return monkeypatch.status()
