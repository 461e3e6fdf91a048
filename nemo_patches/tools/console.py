"""The terminal that a command prints to."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console


def terminal(width: int, **more: Any) -> Console:
    """Under NO_COLOR without any style: rich alone leaves bold and dim text."""
    if os.environ.get("NO_COLOR"):
        more["color_system"] = None
    return Console(width=width, **more)
