"""A process's place in its job, by its launcher's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_patches.tools.doctor.refused import DoctorError


@dataclass(frozen=True)
class RankPlace:
    rank: int
    size: int
    address: str
    port: int
    # Rank 0, where the launcher has not started the store's server already.
    has_server: bool

    @property
    def store(self) -> str:
        return f"the job's store at {self.address}:{self.port}"


def place(variables: Mapping[str, str] = os.environ) -> RankPlace:
    """From torchrun's variables, or Slurm's, where ranks meet as Lightning's do unless MASTER_ADDR
    and MASTER_PORT are set. Raises DoctorError.
    """
    variables = {**_of_slurm(variables), **variables}

    def number(*names: str) -> int:
        for name in names:
            if text := variables.get(name):
                if text.isdigit():
                    return int(text)
                raise DoctorError(
                    f"{name}={text!r} is not allowed; allowed: a number, as torchrun"
                    " sets it"
                )
        raise DoctorError(
            f"--ranks: {names[0]} is not set; it is run on every rank: torchrun ... -m"
            " nemo_patches doctor --ranks"
        )

    rank = number("RANK", "SLURM_PROCID")
    size = number("WORLD_SIZE", "SLURM_NTASKS")
    if rank >= size:
        raise DoctorError(
            f"RANK={rank} is not allowed with WORLD_SIZE={size}; allowed: 0 to"
            f" {size - 1}"
        )
    port = number("MASTER_PORT")
    address = variables.get("MASTER_ADDR")
    if not address:
        raise DoctorError("--ranks: MASTER_ADDR is not set; torchrun sets it")
    by_launcher = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_server = rank == 0 and not by_launcher
    return RankPlace(
        rank=rank, size=size, address=address, port=port, has_server=has_server
    )


def _of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Where Lightning's ranks meet: on the job's first node, at a port that its id gives."""
    job, nodes = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_NODELIST", "")
    if "SLURM_PROCID" not in variables or not job.isdecimal() or not nodes:
        return {}
    # The first of "node[07-09,12],login1" is node07.
    first = re.sub(r"\[(\d+).*", r"\1", nodes).partition(",")[0]
    return {"MASTER_ADDR": first, "MASTER_PORT": str(15000 + int(job[-4:]))}
