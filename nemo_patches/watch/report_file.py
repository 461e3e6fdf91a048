"""This rank's latest stall report: a file in the job's folder, for `nemo-patches diagnose`."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..channel.daemon import Daemon
from ..text import first_line
from .job_folder import goes_with_the_job, private_folder
from .log_line import report
from .process_id import is_of_container, machine
from .torch_knows import FlightRecording, out_of_memory_errors

_READ_LIMIT_S = 1.0
NAME = "stall_rank_{rank}.json"


class ReportFile:
    """The stall monitor's thread calls `write`, which does not wait: a folder's mount may not
    answer.
    """

    def __init__(
        self,
        rank: int,
        store_port: int,
        may_read_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        """store_port: 0 if the job's store has none. may_read_memory: whether that holds up nobody:
        who reads what the GPU's allocator knows may wait with Python's lock.
        """
        self._may_read_memory = may_read_memory
        self._rank = rank
        self._store_port = store_port
        self._writer: threading.Thread | None = None
        self._out_of_memory: dict[str, int] = {}  # as last read
        self._reader: threading.Thread | None = None  # of the GPU's memory
        self._said = ""  # why the last report could not be written
        self._has_said_where = False  # once a job is enough

    def write(
        self, content: dict[str, Any], is_first: bool, says_where: bool = True
    ) -> None:
        """Put this in the place of the report before, with what torch knows.

        is_first: of this stall. says_where: unless another rank of this host logs where it is.
        """
        if self._writer is not None and self._writer.is_alive():
            self._cannot("the job's folder does not answer")
            return
        writer = Daemon("stall report", self._write, content, is_first, says_where)
        if why := writer.begin():
            self._cannot(why)
            return
        self._writer = writer

    def _write(self, content: dict[str, Any], is_first: bool, says_where: bool) -> None:
        """In a thread of its own."""
        recording = FlightRecording()
        try:
            folder = private_folder(self._store_port)
            file = folder / NAME.format(rank=self._rank)
            _replace(file, as_json(content, recording.wait(), self._out_of_memory))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._cannot(f"{where}{error.strerror or error}")
            return
        self._said = ""
        if is_first:
            text = (
                f"this report is in {file}; `nemo-patches diagnose {folder}` reads those"
                " of all ranks on this host"
            )
            if is_of_container(machine()):
                text += ". That is in this rank's container, and so are the pids"
            if goes_with_the_job(folder):
                text += (
                    ". Slurm removes that folder with the job: to keep it, set TMPDIR"
                    " to one that stays, such as a shared one"
                )
            if says_where and not self._has_said_where:
                self._has_said_where = True
                report(logging.INFO, text)
            is_blocked = self._reader is not None and self._reader.is_alive()
            if not is_blocked and self._may_read_memory():
                # One that does not return must not keep the next report from being written.
                reader = Daemon(
                    "GPU's memory", self._read_memory, file, content, recording
                )
                if not reader.begin():
                    self._reader = reader
                    reader.join(_READ_LIMIT_S)

    def _read_memory(
        self, file: Path, content: dict[str, Any], recording: FlightRecording
    ) -> None:
        """Once a stall, and at last: it may wait for the GPU. In a thread of its own."""
        try:
            counts = out_of_memory_errors()
        except Exception as error:  # torch's, of another version
            report(
                logging.INFO,
                f"out-of-memory errors are not counted here: {first_line(error)}",
            )
            return
        if counts == self._out_of_memory:
            return
        self._out_of_memory = counts
        told = ", ".join(f"{count} on {device}" for device, count in counts.items())
        text = "this rank's code has caught out-of-memory errors"
        report(logging.WARNING, f"{text}, and may have left out a step: {told}")
        with contextlib.suppress(OSError):  # it could be written a moment ago
            _replace(file, as_json(content, recording.content, counts))

    def _cannot(self, why: str) -> None:
        if why != self._said:
            self._said = why
            report(logging.WARNING, f"the stall report is not written to a file: {why}")


def as_json(
    content: dict[str, Any],
    recording: dict[str, Any] | None,
    out_of_memory: dict[str, int] | None = None,
) -> bytes:
    """A report with what torch knows of its rank."""
    more: dict[str, Any] = {}
    if recording is not None:
        more["flight_recorder"] = recording
    if out_of_memory:
        more["out_of_memory"] = out_of_memory
    return json.dumps({**content, **more}).encode()


def _replace(file: Path, content: bytes) -> None:
    """Put all of it there, or nothing; only its owner may read it."""
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(
        part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
    )
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
