"""The decoder of a trace's lines: every record is checked and bounded in size, whatever the file
says.

Its types are made from the dataclasses of tracing/records.py, so the format is defined once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any

import msgspec

from nemo_patches.tracing import records

LONGEST_LINE = 1 << 20  # bytes; a longer line is no record
_LARGEST_INT = 1 << 53  # 9 PB, or as many calls
_LARGEST_FLOAT = 1e11  # seconds, of any time
_LONGEST_TEXT, _LONGEST_LIST, _MOST_KEYS = (
    1 << 16,
    1 << 16,
    1 << 10,
)  # characters, items, items


def decode(block: bytes) -> list[records.Record | None]:
    """The records of whole lines, in order; None for a line that is no record."""
    try:
        return list(_decoder.decode_lines(block))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [_decode_line(line) for line in block.split(b"\n") if line]


def format_in(line: bytes) -> int | None:
    """The format number in a header, also of one that this version cannot read; None if there is
    none.
    """
    try:
        return _format_decoder.decode(line).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def header_in(line: bytes) -> records.Header | None:
    """The header in a line; None if it holds none."""
    record: Any = _decode_line(line)
    if type(record) is not structs[records.Header]:
        return None
    return records.Header(
        **{name: getattr(record, name) for name in record.__struct_fields__}
    )


def _decode_line(line: bytes) -> records.Record | None:
    try:
        record: records.Record = _decoder.decode(
            line
        )  # a struct with the fields of that dataclass
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _bounded(hint: Any) -> Any:
    """The same type, with bounds on every number, text, list and mapping in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_bounded(argument) for argument in arguments)]  # noqa: UP007  # of a tuple
    if origin is list:
        items: Any = _bounded(arguments[0])
        return Annotated[list[items], msgspec.Meta(max_length=_LONGEST_LIST)]
    if origin is dict:
        values: Any = _bounded(arguments[1])
        return Annotated[dict[str, values], msgspec.Meta(max_length=_MOST_KEYS)]
    if hint is int:
        return Annotated[int, msgspec.Meta(ge=-_LARGEST_INT, le=_LARGEST_INT)]
    if hint is float:
        return Annotated[float, msgspec.Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
    if hint is str:
        return Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]
    return hint


def _struct(kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    fields = [
        (field.name, _bounded(hints[field.name]), *_default(field))
        for field in dataclasses.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, fields, tag_field="k", tag=kind.k, gc=False)


def _default(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The default of a field that older traces do not have; nothing for the others."""
    if field.default_factory is not dataclasses.MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    return () if field.default is dataclasses.MISSING else (field.default,)


class _Format(msgspec.Struct, tag_field="k", tag=records.Header.k):
    """What a header of every format has."""

    format: int


_format_decoder = msgspec.json.Decoder(_Format)
structs: dict[type[Any], type[Any]] = {
    kind: _struct(kind) for kind in typing.get_args(records.Record)
}
_any_record: Any = typing.Union[tuple(structs.values())]  # noqa: UP007
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_any_record)
