"""A reader for pickles of plain data: containers, text and numbers.

Nothing in a file is ever called.

`pickle.load` calls what a file names. This one finds nothing by a name. It is Python's own in
Python: that one in C takes memory for whatever index a file names.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

LARGEST_BYTES = 1 << 28


class NotPlainError(Exception):
    """The data are no pickle, or one that is not of plain data only. The text says what was met."""


class _Reader(pickle._Unpickler):
    # A bytearray takes as much memory as its file says, and an object is built by its own code.
    dispatch = {  # noqa: RUF012  # as its own is
        code: read
        for code, read in pickle._Unpickler.dispatch.items()
        if code not in pickle.BYTEARRAY8 + pickle.BUILD
    }

    def find_class(self, module: str, name: str) -> Any:
        """What is called comes by its name alone."""
        raise NotPlainError(f"{module}.{name}")


def load(data: bytes) -> Any:
    """The one object in a pickle. Raises NotPlainError.

    Parts that are shared in the pickle are shared in the object, so going through it must be
    bounded.
    """
    if len(data) > LARGEST_BYTES:
        raise NotPlainError(f"{len(data)} bytes, more than {LARGEST_BYTES}")
    try:
        return _Reader(io.BytesIO(data)).load()
    # Another instruction, a stack that is too short, a key that cannot be one ...
    except Exception as error:
        raise NotPlainError(
            f"no pickle of plain data: {type(error).__name__} {error}"
        ) from error
