"""The doctor's error."""

from __future__ import annotations


class DoctorError(Exception):
    """The command cannot be carried out, or a file cannot be read. The text says which, where in
    it, and why.
    """
