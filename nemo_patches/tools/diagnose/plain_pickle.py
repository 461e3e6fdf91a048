"""A reader for pickles of plain data: containers, text and numbers.

Nothing in a file is ever called.

`pickle.load` runs code from a file. This one knows the instructions that build plain data alone. It
is Python's own in Python: that one in C takes memory for whatever index a file names.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

LARGEST_BYTES = 1 << 28

_PLAIN = (
    *(
        pickle.PROTO,
        pickle.FRAME,
        pickle.STOP,
        pickle.MARK,
        pickle.NONE,
        pickle.NEWTRUE,
        pickle.NEWFALSE,
    ),
    *(
        pickle.INT,
        pickle.LONG,
        pickle.LONG1,
        pickle.LONG4,
        pickle.BININT,
        pickle.BININT1,
        pickle.BININT2,
    ),
    *(pickle.FLOAT, pickle.BINFLOAT),
    *(pickle.UNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
)


class NotPlainError(Exception):
    """The data are no pickle, or one that is not of plain data only. The text says what was met."""


class _Reader(pickle._Unpickler):
    dispatch = {ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _PLAIN}  # noqa: RUF012  # as its own is


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
