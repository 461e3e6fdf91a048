"""What a value is on each of some forty members of a job, where the rank number decides it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_patches.tools.doctor.syntax import nodes

_MANY = 1024  # ranks of the job whose members are told apart
_NODES = 128
_MOST_NUMBERS = 12  # of a file that ranks are taken at and around
_MOST_DIGITS = 3
_MOST_SHIFTED = 64  # bits
_MOST_BITS = 1000  # of a number that is computed
_MOST_ITEMS = 1000  # and of a text or a list

Column = tuple[Any, ...]


class Open(str):
    """What of a test the ranks do not decide."""


@dataclass(frozen=True)
class SampleMember:
    rank: int
    ranks: int = _MANY
    nodes: int = _NODES


@dataclass(frozen=True)
class Members:
    """Those that the tests of a file may tell apart. job: how many of them, the first ones, are of
    one job; the others are rank 0 of jobs of other sizes.
    """

    every: tuple[SampleMember, ...]
    job: int

    def __len__(self) -> int:
        return len(self.every)

    def differ(self, at: Column | None) -> bool:
        """Whether something differs between the members of one job."""
        return at is not None and at[: self.job].count(at[0]) < self.job


def members_of(tree: ast.AST) -> Members:
    numbers = {
        int(str(each.value))
        for each in nodes(tree, ast.Constant)
        if isinstance(each.value, (int, str))
        and len(str(each.value)[: _MOST_DIGITS + 1]) <= _MOST_DIGITS
        and str(each.value).isdecimal()
    }
    named = sorted(numbers)[:_MOST_NUMBERS]
    ranks = {
        *range(17),
        _MANY - 1,
        *named,
        *(each + 1 for each in named),
        *(_MANY - each for each in named),
        *(_MANY // each for each in named if each),
    }
    job = [SampleMember(rank) for rank in sorted(ranks) if rank < _MANY]
    sizes = sorted({2, *named} - {0, 1})
    others = [SampleMember(0, size, nodes) for size in sizes for nodes in (1, size)]
    return Members(every=(*job, *others), job=len(job))


def _multiplied(left: Any, right: Any) -> Any:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _small(left * right)
    raise ValueError("no numbers")  # a text or a list of any length


def _added(left: Any, right: Any) -> Any:
    return _small(left + right)


def _small(value: Any) -> Any:
    """What a file asks of ranks is small: others would grow from one statement to the next."""
    too_long = isinstance(value, (str, list, tuple)) and len(value) > _MOST_ITEMS
    if too_long or (isinstance(value, int) and value.bit_length() > _MOST_BITS):
        raise ValueError("too large")
    return value


OPERATIONS: dict[Any, Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Add: _added,
    ast.Sub: operator.sub,
    ast.Mult: _multiplied,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: lambda left, right: operator.mod(int(left), right),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: lambda left, right: left * 2 ** min(right, _MOST_SHIFTED),
    ast.RShift: operator.rshift,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    "abs": abs,
    "bool": bool,
    "divmod": divmod,
    "int": int,
    "max": max,
    "min": min,
    "range": range,
    "str": str,
}


def applied(
    operation: Callable[..., Any] | None, columns: Sequence[Column | None], text: str
) -> Column | None:
    """An operation on each member; None where nothing is known of it."""
    known = [each for each in columns if each is not None]
    if not columns or len(known) < len(columns) or operation is None:
        return None
    try:
        at = tuple(
            _on_member(operation, parts, text) for parts in zip(*known, strict=True)
        )
    except (ArithmeticError, TypeError, ValueError):
        return None
    return at if any(not isinstance(each, Open) for each in at) else None


def _on_member(operation: Callable[..., Any], parts: Sequence[Any], text: str) -> Any:
    if any(isinstance(each, Open) for each in parts):
        return Open(text)
    try:
        return operation(*parts)
    except LookupError:  # a table has no such rank: it is of a smaller job
        return Open(text)


def negated(text: str) -> Open:
    return Open(text[5:-1] if text.startswith("not (") else f"not ({text})")


def truths(at: Column | None, text: str, members: int) -> list[Any]:
    """Whether it is true on each member, or what decides that."""
    return [
        each if isinstance(each, Open) else bool(each)
        for each in at or (Open(text),) * members
    ]


def both(one: Sequence[Any], other: Sequence[Any], ends: bool) -> Column:
    """`and` (ends False) or `or` (ends True) of truths."""
    return tuple(
        _both(left, right, ends) for left, right in zip(one, other, strict=True)
    )


def _both(left: Any, right: Any, ends: bool) -> Any:
    if left is ends or right is ends:
        return ends
    opened = [each for each in dict.fromkeys((left, right)) if isinstance(each, Open)]
    return Open((" or " if ends else " and ").join(opened)) if opened else not ends
