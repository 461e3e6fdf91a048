"""The error of `nemo-patches diff`."""


class DiffError(Exception):
    """Refused. The text says what was found, and where."""
