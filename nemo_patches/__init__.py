"""Training NVIDIA NeMo speech models on several ranks without hanging in the encoder's length sync.

`apply()`, `revert()` and `status()` are the whole interface, with the classes that they raise and
give: a script writes `except nemo_patches.LengthSyncTimeout`. Importing this package imports
neither torch nor NeMo.
"""

# Every Python process under auto-apply imports this file at start-up: it imports nothing, not even
# typing or __future__, and its syntax is that of any Python 3.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Literal

    from nemo_patches.judging.missing_rank import MissingRank as MissingRank
    from nemo_patches.options.agreement import StopTogetherError as StopTogetherError
    from nemo_patches.options.checkpoints import CheckpointError as CheckpointError
    from nemo_patches.options.even_loader import stop_together as stop_together
    from nemo_patches.patching.admission import UnsupportedNeMo as UnsupportedNeMo
    from nemo_patches.patching.process_status import Status as Status
    from nemo_patches.patching.targets import DriftError as DriftError
    from nemo_patches.sync.length_sync import LengthSyncTimeout as LengthSyncTimeout
    from nemo_patches.sync.settings import SettingsError as SettingsError

__version__ = "0.2.0"
__all__ = [
    "CheckpointError",
    "DriftError",
    "LengthSyncTimeout",
    "MissingRank",
    "SettingsError",
    "Status",
    "StopTogetherError",
    "UnsupportedNeMo",
    "apply",
    "revert",
    "status",
    "stop_together",
]

# Imported at their first use; the same as above, for type checkers.
_MODULE_OF = {
    "CheckpointError": "nemo_patches.options.checkpoints",
    "DriftError": "nemo_patches.patching.targets",
    "LengthSyncTimeout": "nemo_patches.sync.length_sync",
    "MissingRank": "nemo_patches.judging.missing_rank",
    "SettingsError": "nemo_patches.sync.settings",
    "Status": "nemo_patches.patching.process_status",
    "StopTogetherError": "nemo_patches.options.agreement",
    "UnsupportedNeMo": "nemo_patches.patching.admission",
    "stop_together": "nemo_patches.options.even_loader",
}

# A type checker would take any attribute of a module that has __getattr__.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError("module 'nemo_patches' has no attribute " + repr(name))
        from importlib import import_module

        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> "list[str]":
    return sorted(set(globals()).union(_MODULE_OF))


def apply(
    sync: "Literal['bounded', 'local'] | None" = None,
    timeout: "float | None" = None,
    on_timeout: "Literal['fallback', 'raise'] | None" = None,
    stall_timeout: "float | None" = None,
    stall_exit: "float | None" = None,
    on_stall: "str | None" = None,
    trace: "str | os.PathLike[str] | None" = None,
    trace_checks: "str | Sequence[str] | None" = None,
    metrics: "Literal['stock', 'deferred'] | None" = None,
    stop_together: "str | Sequence[str] | None" = None,
    checkpoints: "Literal['agreed', 'stock'] | None" = None,
) -> None:
    """Patch NeMo's length syncs and checkpoint callback in this process.

    A second call only changes the settings. A keyword that is not given comes from its variable
    (timeout: NEMO_PATCHES_TIMEOUT, and so on), then the default. With NEMO_PATCHES_DISABLE=1
    nothing is patched, and a line says so.

    sync: "bounded" (default) waits for the other ranks at most `timeout`; "local" does not
        communicate.
    timeout: seconds (default 10) that one encoder call waits.
    on_timeout: "fallback" (default) continues with this rank's own length; "raise" raises
        LengthSyncTimeout.
    stall_timeout: seconds (default 60, 0: never) without an encoder call, after which every rank
        logs where all ranks are.
    stall_exit: seconds (default 0: never) of such a stall, after which the process ends with exit
        code 83.
    on_stall: a command, run once per stall by one rank, with the report as JSON on its standard
        input.
    trace: a folder; every rank records its encoder calls there (docs/trace.md), for
        `nemo-patches diagnose`. "-": a line before and after each call, on stderr. "": no trace.
    trace_checks: "inputs", "cuda", "barrier", or several, with commas; what they find is logged.
    metrics: "stock" (default): WER and BLEU wait for all ranks in every batch of an evaluation;
        "deferred": their sums are added up once, at its end.
    stop_together: "training", "evaluation", or both, with a comma: Lightning trainers created from
        now on get a StopTogether, which drops batches (docs/uneven.md). "": none.
    checkpoints: "agreed" (default): all ranks follow rank 0's decisions in NeMo's checkpoint
        callback, and wait for each other there; CheckpointError if a rank has died. "stock": each
        rank decides for itself, and may hang.

    It applies to this process and the processes that it forks. A spawned one
    (torch.multiprocessing.spawn, Lightning's ddp_spawn) starts as stock: call apply() in the
    spawned function, or start the job with `nemo-patches run`.

    Raises SettingsError (a ValueError) for a value that is not allowed, UnsupportedNeMo for a NeMo
    outside the supported range, DriftError if NeMo's code is not as expected (nothing is patched
    then), ModuleNotFoundError if NeMo is not installed.
    """
    given = dict(locals())  # every keyword
    from nemo_patches.sync.settings import Settings

    settings = Settings.resolve(given)
    from nemo_patches.patching import monkeypatch, start_up

    if monkeypatch.this_process.apply(settings, start_up.is_installed()):
        start_up.install()


def revert() -> None:
    """Restore every patched attribute of NeMo to its original object; training continues as
    stock.
    """
    from nemo_patches.patching import monkeypatch

    monkeypatch.this_process.revert()


def status() -> "Status":
    """What is patched, what was skipped and why, the settings, and what each encoder's sync has
    done on this rank.
    """
    from nemo_patches.patching import monkeypatch, process_status, start_up

    return process_status.status_of(monkeypatch.this_process, start_up.is_installed())
