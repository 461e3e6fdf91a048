"""A rank's process, as its neighbours know it: a process on the same machine can tell whether it has ended."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """machine: 8 bytes, equal where a pid means the same process."""

    pid: int
    machine: bytes

    def has_ended(self, machine: bytes) -> bool:
        """Whether it has certainly ended. machine: the asking process's; False on another, as it cannot be known."""
        if self.machine != machine:
            return False
        try:
            os.kill(self.pid, 0)
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return True
        except (OSError, OverflowError, IndexError):  # not ours to ask; no file left to read with
            return False
        return state in "ZX"  # killed, and not reaped yet


def this_machine() -> bytes:
    """This boot of this kernel, and its pid namespace; unique if these cannot be read."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_bytes(8)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
