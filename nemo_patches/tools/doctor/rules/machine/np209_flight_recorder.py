"""PyTorch's flight recorder, which says afterwards which collective each rank was in.

It keeps the last collectives of every rank, and writes them to a file when one times out; without
it, there is only the watchdog's line. Its defaults differ: torch 2.13 records and writes, torch 2.5
does neither unless configured.
Link: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

import contextlib

from packaging.version import InvalidVersion, Version

from nemo_patches.tools.doctor.finding import Findings, note, warning
from nemo_patches.tools.doctor.machine import OFF, Machine

# The first counts where torch knows it.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
# Read in its source; between that and 2.5 both defaults changed.
_ON_BY_DEFAULT = Version("2.13")
_SET = f"{_SIZES[1]}=2000 and {_DUMP}=1, which every torch 2 reads"


def check(machine: Machine) -> Findings:
    """A switched off recorder, wherever that is; what is only not set, where there are GPUs."""
    sizes = [machine.variable(name) for name in _SIZES]
    dump = machine.variable(_DUMP)
    length = next((value for value in sizes if value.given), sizes[1])
    by_default = False
    with contextlib.suppress(InvalidVersion):
        by_default = Version(machine.torch) >= _ON_BY_DEFAULT
    if length.given and str(length.value).lstrip("-").strip("0") == "":
        yield warning(f"{length.key}=0 switches the flight recorder off", length, _SET)
    elif dump.given and str(dump.value).lower() in OFF:
        yield warning(
            f"{_DUMP}={dump.value}: what the flight recorder has is not written when a"
            " collective times out",
            dump,
            _SET,
        )
    elif machine.gpus and not (length.given and dump.given) and not by_default:
        yield note(
            "whether the flight recorder is on depends on torch's version, and the job"
            f" does not say it: set {_SET}",
            (length, dump),
            _SET,
        )
