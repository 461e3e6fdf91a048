"""The errors of `nemo-patches diff`."""


class DiffError(Exception):
    """Refused. The text says what was found, and where."""


class Declined(DiffError):
    """The answer is no, and there is nothing to do. The text says why."""
