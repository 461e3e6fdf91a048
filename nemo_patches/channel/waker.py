"""A file that wakes a thread."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import weakref


class Waker:
    """Any thread may call `wake`, also a signal handler's or the garbage collector's.

    The file is closed with the last reference, with no lock and no collection: then nobody is about
    to write to it, when another file may get its number.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file).atexit = False

    def wake(self) -> None:
        os.eventfd_write(self.file, 1)

    def rest(self) -> None:
        """As the thread that was woken."""
        os.eventfd_read(self.file)
