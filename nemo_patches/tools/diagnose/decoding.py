"""Lines of a trace as records: checked, and bounded in size, whatever the file says.

The types are made from the dataclasses of tracing/records.py, so there is one definition of the format.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any

import msgspec

from nemo_patches.tracing import records

LONGEST_LINE = 1 << 20  # bytes; a longer one is no record
_LARGEST = 1 << 53  # of a whole number: 9 PB, or as many calls
_LATEST = 1e11  # seconds, of any time
_LONGEST_TEXT, _LONGEST_LIST, _MOST_KEYS = 1 << 16, 1 << 16, 1 << 10


def decode(block: bytes) -> list[records.Record | None]:
    """The records of whole lines, in order; None for a line that is no record."""
    try:
        return list(_decoder.decode_lines(block))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [_one(line) for line in block.split(b"\n") if line]


def header_in(line: bytes) -> records.Header | None:
    """The header in a line; None where there is none."""
    record: Any = _one(line)
    if type(record) is not structs[records.Header]:
        return None
    return records.Header(**{name: getattr(record, name) for name in record.__struct_fields__})


def _one(line: bytes) -> records.Record | None:
    try:
        record: records.Record = _decoder.decode(line)  # a struct with the same fields
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _bounded(hint: Any) -> Any:
    """The same type, with bounds on every number, text, list and mapping in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_bounded(one) for one in arguments)]  # noqa: UP007  # of a tuple
    if origin is list:
        return Annotated[list[_bounded(arguments[0])], msgspec.Meta(max_length=_LONGEST_LIST)]  # type: ignore[misc]
    if origin is dict:
        return Annotated[dict[str, _bounded(arguments[1])], msgspec.Meta(max_length=_MOST_KEYS)]  # type: ignore[misc]
    if hint is int:
        return Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
    if hint is float:
        return Annotated[float, msgspec.Meta(ge=-_LATEST, le=_LATEST)]
    if hint is str:
        return Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]
    return hint


def _struct(kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    fields = [(field.name, _bounded(hints[field.name])) for field in dataclasses.fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, tag_field="k", tag=kind.k, gc=False)


structs: dict[type[Any], type[Any]] = {kind: _struct(kind) for kind in typing.get_args(records.Record)}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(typing.Union[tuple(structs.values())])  # noqa: UP007
