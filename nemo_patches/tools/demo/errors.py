"""The demo's error."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot start. The text names the setting, its value and what is allowed, or a log."""
