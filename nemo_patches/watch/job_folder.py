"""The job's folder on this host: a private one in the system's temporary folder."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path


def private_folder(store_port: int) -> Path:
    """The folder, made if need be. store_port: 0 if the job's store has none. Raises OSError."""
    mine = private_folders()
    folder = mine / job_name(os.environ, store_port, os.getppid())
    for each in (mine, folder):
        _make_private(each)
    return folder


def private_folders() -> Path:
    """The parent of this user's job folders. On Windows, where no job runs, it can still be
    read.
    """
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    return Path(tempfile.gettempdir()) / f"nemo_patches-{user}"


def job_name(environment: Mapping[str, str], store_port: int, parent: int) -> str:
    """The job's name: the same for all its ranks on this host, and if possible different for every
    other job.

    Two jobs may have one run id, as from a page that was pasted; two of Slurm's steps have one
    job's. So the store's address and the step are part of it, as eight digits.
    """
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    # Torchrun's default; it is itself the parent of its ranks, also after a restart.
    if run == "none":
        run = f"torchrun-{parent}"
    name = run or environment.get("SLURM_JOB_ID", "") or f"port-{store_port}"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100]
    address = environment.get("MASTER_ADDR", "")
    if not address:
        return name
    where = f"{address} {store_port} {environment.get('SLURM_STEP_ID', '')}"
    return f"{name}-{zlib.crc32(where.encode(errors='replace')):08x}"


def _make_private(folder: Path) -> None:
    """Everyone may write to a temporary folder, so an existing folder must belong to us alone."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & 0o077
    ):
        why = (
            "it is not a folder that this user alone may read; set TMPDIR to another"
            " place"
        )
        raise PermissionError(0, why, str(folder))


def goes_with_the_job(folder: Path) -> bool:
    """Whether Slurm removes a job's folder at the job's end: it may give each job a /tmp, or a
    TMPDIR, with the job's id in its name.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    temporary = str(folder.parent.parent)
    places = [temporary]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            root, mounted_at = line.split()[3:5]
            if mounted_at == temporary:
                places.append(root)
    return bool(job) and any(job in re.findall(r"\d+", place) for place in places)
