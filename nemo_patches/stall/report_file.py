"""This rank's latest stall report as a file in the job's folder, for `nemo-patches diagnose FOLDER`."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from ..channel.daemon import Daemon
from .job_folder import private_folder
from .log_line import report

NAME = "stall_rank_{rank}.json"


class ReportFile:
    """The stall monitor's thread calls `write`, which does not wait: a folder's mount may not answer."""

    def __init__(self, rank: int, store_port: int) -> None:
        """store_port: 0 if the job's store has none."""
        self._rank = rank
        self._store_port = store_port
        self._writer: threading.Thread | None = None
        self._said = ""  # why the last report could not be written

    def write(self, content: str, names_folder: bool) -> None:
        """Put this in the place of the report before. names_folder: log where it is."""
        if self._writer is not None and self._writer.is_alive():
            self._cannot("the job's folder does not answer")
            return
        writer = Daemon("stall report", self._write, content, names_folder)
        if why := writer.begin():
            self._cannot(why)
            return
        self._writer = writer

    def _write(self, content: str, names_folder: bool) -> None:
        """In a thread of its own."""
        try:
            folder = private_folder(self._store_port)
            file = folder / NAME.format(rank=self._rank)
            _replace(file, content.encode())
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._cannot(f"{where}{error.strerror or error}")
            return
        self._said = ""
        if names_folder:
            what = f"this report is in {file}"
            command = f"`nemo-patches diagnose {folder}`"
            report(logging.INFO, f"{what}; {command} reads those of all ranks on this host")

    def _cannot(self, why: str) -> None:
        if why != self._said:
            self._said = why
            report(logging.WARNING, f"the stall report is not written to a file: {why}")


def _replace(file: Path, content: bytes) -> None:
    """Put all of it there, or nothing; only its owner may read it."""
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
