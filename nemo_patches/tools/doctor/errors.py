"""The doctor's error."""

from __future__ import annotations


class DoctorError(Exception):
    """The command cannot be carried out as it was given. The text says why."""
