"""What a test in Python says on one rank: true, false, or the part of it that is not about the rank."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_patches.tools.doctor.collectives import Names
from nemo_patches.tools.doctor.syntax import IDENTITIES, dotted, last_part, words

RANKS = (0, 1, 7)  # that are tried: the first, one beside it, and one of another node

_NUMBERS = words(
    """
    get_global_rank get_local_rank get_rank get_world_rank global_rank local_process_index
    local_rank node_rank process_index rank world_rank
    """
)
_FIRST = words(
    """
    is_global_rank_zero is_global_zero is_local_main_process is_main_process is_master
    is_master_process is_rank_zero is_world_process_zero main_process master_process
    """
)
_VARIABLES = words("RANK LOCAL_RANK NODE_RANK GROUP_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK")
_UNKNOWN: Any = object()
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Mod: lambda left, right: left % right if isinstance(left, int) else _UNKNOWN,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.List: lambda *parts: parts,
    ast.Tuple: lambda *parts: parts,
    ast.Set: lambda *parts: parts,
}
_MOST_STEPS = 8


@dataclass(frozen=True)
class RankTests:
    """Reads tests on the rank. assigned: for local variables, what they are assigned; empty where that is not known."""

    names: Names
    assigned: Mapping[str, Sequence[ast.expr]] = field(default_factory=dict)

    def decided(self, test: ast.expr, rank: int) -> bool | str:
        """Whether a test holds on a rank, or the text of what else it depends on."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand, rank)
            return f"not ({inner})" if isinstance(inner, str) else not inner
        if isinstance(test, ast.BoolOp):
            ends = isinstance(test.op, ast.Or)
            parts = [self.decided(each, rank) for each in test.values]
            if any(part is ends for part in parts):
                return ends
            texts = [part for part in parts if isinstance(part, str)]
            return (" or " if ends else " and ").join(texts) if texts else not ends
        value = self._value(test, rank)
        return ast.unparse(test) if value is _UNKNOWN else bool(value)

    def about_rank(self, test: ast.expr) -> bool:
        """Whether a test is one on the rank, in part at least."""
        if isinstance(test, ast.UnaryOp):
            return self.about_rank(test.operand)
        if isinstance(test, ast.BoolOp):
            return any(self.about_rank(each) for each in test.values)
        if isinstance(test, ast.Compare):
            presence = any(isinstance(each, IDENTITIES) for each in test.ops)
            return not presence and any(self._is_rank(each) for each in (test.left, *test.comparators))
        return self._is_rank(test) and not isinstance(self._value(test, 0), str)  # a variable that is set

    def _is_rank(self, node: ast.expr, steps: int = 0) -> bool:
        """Whether an expression differs between ranks, and by the rank alone."""
        values = [self._value(node, rank, steps) for rank in RANKS]
        return not any(each is _UNKNOWN for each in values) and any(each != values[0] for each in values)

    def _value(self, node: ast.expr, rank: int, steps: int = 0) -> Any:
        """The value of an expression on a rank; _UNKNOWN if the rank alone does not decide it."""
        if steps > _MOST_STEPS:
            return _UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self._assigned(node.id, rank, steps)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            return self._named(node, rank, steps)
        if isinstance(node, ast.IfExp):  # get_rank() if is_initialized() else 0
            return self._of_rank((node.body, node.orelse), rank, steps)
        operation, operands = _parts(node)
        values = [self._value(each, rank, steps + 1) for each in operands]
        if any(each is _UNKNOWN for each in values):
            return _UNKNOWN
        try:
            return _OPERATIONS[type(operation)](*values)
        except (KeyError, TypeError, ZeroDivisionError):  # `is`; a text with a number
            return _UNKNOWN

    def _of_rank(self, given: Sequence[ast.expr], rank: int, steps: int, only: ast.expr | None = None) -> Any:
        """The value of that alternative which depends on the rank; otherwise of `only`."""
        own = next((each for each in given if self._is_rank(each, steps + 1)), only)
        return _UNKNOWN if own is None else self._value(own, rank, steps + 1)

    def _assigned(self, name: str, rank: int, steps: int) -> Any:
        """rank = 0, and where there is a process group rank = get_rank()."""
        given = self.assigned[name]
        inner = RankTests(self.names, {other: values for other, values in self.assigned.items() if other != name})
        return inner._of_rank(given, rank, steps, only=given[0] if len(given) == 1 else None)

    def _named(self, node: ast.expr, rank: int, steps: int) -> Any:
        if isinstance(node, ast.Subscript):
            return _of_environment(dotted(node.value), node.slice, rank)
        if not isinstance(node, ast.Call):
            return self._by_name(node, rank)
        name = dotted(node.func)
        if name == "int" and node.args:
            value = self._value(node.args[0], rank, steps + 1)
            return int(value) if isinstance(value, (int, str)) and str(value).isdigit() else _UNKNOWN
        if name in ("os.environ.get", "os.getenv") and node.args:
            return _of_environment("os.environ", node.args[0], rank)
        of_a_group = node.args or node.keywords
        return _UNKNOWN if of_a_group else self._by_name(node.func, rank)

    def _by_name(self, node: ast.expr, rank: int) -> Any:
        name = last_part(self.names.origin(node))
        if name in _NUMBERS:
            return rank
        return rank == 0 if name in _FIRST else _UNKNOWN


def _of_environment(owner: str, key: ast.expr, rank: int) -> Any:
    known = owner.endswith("environ") and isinstance(key, ast.Constant) and key.value in _VARIABLES
    return str(rank) if known else _UNKNOWN


def _parts(node: ast.expr) -> tuple[ast.AST, list[ast.expr]]:
    """What an expression does, and with which others."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return node, node.elts
    if isinstance(node, ast.UnaryOp):
        return node.op, [node.operand]
    if isinstance(node, ast.BinOp):
        return node.op, [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return node.ops[0], [node.left, *node.comparators]
    return node, []
