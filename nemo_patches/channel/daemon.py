"""Our threads:
all are daemons, and where this process may have no more of them it goes on without.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
from collections.abc import Callable

from . import signals


class Daemon(threading.Thread):
    """A thread that an interpreter does not wait for; `begin` starts it."""

    def __init__(
        self, name: str, run: Callable[..., object], *arguments: object
    ) -> None:
        super().__init__(
            target=run, args=arguments, name=f"nemo_patches {name}", daemon=True
        )

    def run(self) -> None:
        """No write in it ends this process by a signal."""
        signals.block()
        super().run()

    def begin(self) -> str:
        """Why it cannot start; empty where it runs.

        As many as this user or container may have run already, or the interpreter ends. `ident` is
        None then, as where a signal handler raised before it started.
        """
        try:
            self.start()
        except RuntimeError as error:
            return str(error)
        return ""
