"""What a test in Python says on one rank of several:
true, false, or the part of it that something else decides.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nemo_patches.tools.doctor.collectives import Names
from nemo_patches.tools.doctor.syntax import (
    IDENTITIES,
    constant,
    dotted,
    expressions,
    last_part,
    nodes,
    text_of,
    words,
)

_NUMBERS = words(
    """
    get_global_rank get_local_rank get_rank get_world_rank global_rank local_process_index
    local_rank node_rank process_index rank world_rank
    """
)
_FIRST = words(
    """
    is_first_rank is_global_rank_zero is_global_zero is_local_main_process is_local_process_zero
    is_main is_main_process is_main_rank is_master is_master_process is_master_rank is_rank0
    is_rank_0 is_rank_zero is_world_process_zero main_process master_process
    """
)
_LAST = words("is_last_process is_last_rank")
_SIZES = words(
    """
    data_parallel_size data_parallel_world_size ddp_world_size distributed_world_size dp_size
    dp_world_size get_data_parallel_world_size get_num_processes get_world_size n_procs nprocs
    num_gpus num_processes num_replicas world_size
    """
)
_SEVERAL = words(
    """
    ddp ddp_enabled dist_enabled distributed distributed_enabled is_ddp is_dist
    is_dist_avail_and_initialized is_dist_initialized is_distributed is_distributed_initialized
    is_multi_gpu is_torch_distributed multi_gpu use_ddp use_dist use_distributed using_ddp
    """
)
# Of each node.
_DEVICES = words("""
    devices_per_node get_local_world_size gpus gpus_per_node local_world_size n_gpus
    ngpus_per_node nproc_per_node num_devices num_gpus_per_node
    """)
_NODES = words("n_nodes nnodes nodes num_nodes")
_ALONE = words("is_single_gpu is_single_process single_gpu single_process")
# Of torch.distributed.
_READY = words("is_available is_initialized is_torchelastic_launched")
_VARIABLES = words(
    "RANK LOCAL_RANK NODE_RANK GROUP_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK"
)
_SIZE_VARIABLES = words("WORLD_SIZE SLURM_NTASKS OMPI_COMM_WORLD_SIZE")
UNKNOWN: Any = object()
# By the kind of an operator, and the names of functions.
_OPERATIONS: dict[type[ast.AST] | str, Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Mod: lambda left, right: left % right if isinstance(left, int) else UNKNOWN,
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.RShift: operator.rshift,
    ast.LShift: lambda left, right: left * 2 ** min(right, 64),
    ast.BitXor: operator.xor,
    ast.BitOr: operator.or_,
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
    "abs": abs,
    "bool": bool,
    "int": int,
    "max": max,
    "min": min,
    "range": range,
    "str": str,
}
_SOUNDS_LIKE_RANK = re.compile("rank|proc|ordinal", re.IGNORECASE)
_MOST_STEPS = 8
_MOST_MEMBERS = 16
_FEW = 2
_MANY = 1024  # ranks, of which no test names the last by its number
_NODES_OF_MANY = 128


@dataclass(frozen=True)
class Member:
    """One rank of a job with that many."""

    rank: int
    ranks: int = _MANY
    nodes: int = _NODES_OF_MANY


FIRST = Member(0)
# In which a test on the rank shows.
_PROBES = (*map(Member, range(9)), Member(_MANY - 1))
_TRIED = 24  # ranks, beside those that a test names


@dataclass(frozen=True)
class RankTests:
    """Reads tests on the rank, and on whether there are several.

    assigned: for variables, what they are assigned; empty where that is not known.
    """

    names: Names
    assigned: Mapping[str, Sequence[ast.expr]] = field(default_factory=dict)
    # Of alternatives, by their ids: the one that depends on the rank.
    _depending: dict[tuple[int, ...], ast.expr | None] = field(default_factory=dict)
    # By a variable's name: the tests without it.
    _without: dict[str, RankTests] = field(default_factory=dict)

    def decided(self, test: ast.expr, member: Member) -> bool | str:
        """Whether a test holds on a rank, or the text of what else it depends on."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand, member)
            return f"not ({inner})" if isinstance(inner, str) else not inner
        if isinstance(test, ast.BoolOp):
            ends = isinstance(test.op, ast.Or)
            parts = [self.decided(each, member) for each in test.values]
            if any(part is ends for part in parts):
                return ends
            texts = [part for part in parts if isinstance(part, str)]
            return (" or " if ends else " and ").join(texts) if texts else not ends
        value = self._value(test, member)
        return ast.unparse(test) if value is UNKNOWN else bool(value)

    def decided_on_several(self, test: ast.expr) -> bool | str:
        """What a test says on all ranks wherever there are several, whatever their number."""
        answer = self.decided(test, FIRST)
        if answer == text_of(test):
            return answer
        sizes = {_FEW, *self._numbers([test])} - {0, 1}
        members = [Member(0, size, nodes) for size in sizes for nodes in (1, size)]
        members += map(Member, self._tried([test]))
        alike = all(self.decided(test, each) == answer for each in members)
        return answer if alike else text_of(test)

    def about_rank(self, test: ast.expr) -> bool:
        """Whether a test is one on the rank, in part at least."""
        if isinstance(test, (ast.UnaryOp, ast.BoolOp)):
            return any(map(self.about_rank, expressions(test)))
        if isinstance(test, ast.Compare):
            presence = any(isinstance(each, IDENTITIES) for each in test.ops)
            return not presence and any(
                self._is_rank(each) for each in (test.left, *test.comparators)
            )
        # A variable that is set.
        return self._is_rank(test) and not isinstance(self._value(test, FIRST), str)

    def members(self, tests: Iterable[ast.expr]) -> list[Member]:
        """Ranks, one for each way in which some tests may be decided; those that the tests name are
        among them.
        """
        tests = list(tests)
        found: dict[tuple[bool | str, ...], Member] = {}
        for member in map(Member, self._tried(tests)):
            found.setdefault(
                tuple(self.decided(test, member) for test in tests), member
            )
        return list(found.values())[:_MOST_MEMBERS]

    def _tried(self, tests: Sequence[ast.expr]) -> list[int]:
        numbers = self._numbers(tests)
        ends = {_MANY - each for each in numbers} | {
            _MANY // each for each in numbers - {0}
        }
        ranks = {*range(_TRIED), *numbers, *ends, _MANY - 1}
        return sorted(rank for rank in ranks if 0 <= rank < _MANY)

    def _numbers(self, tests: Iterable[ast.expr]) -> set[int]:
        """The numbers in some tests, and in what their variables are assigned, each with the next
        one.
        """
        numbers = set[int]()
        waiting = list(tests)
        followed = set[str]()
        for test in waiting:
            for node in nodes(test, ast.Constant, ast.Name):
                if isinstance(node, ast.Constant) and str(node.value).isdecimal():
                    number = int(str(node.value))
                    numbers |= {number, number + 1}
                elif isinstance(node, ast.Name) and node.id not in followed:
                    followed.add(node.id)
                    waiting += self.assigned.get(node.id, ())
        return numbers

    def _is_rank(self, node: ast.expr, steps: int = 0) -> bool:
        """Whether an expression differs between ranks, and by the rank alone."""
        return self._differs(node, _PROBES, steps)

    def _differs(self, node: ast.expr, members: Sequence[Member], steps: int) -> bool:
        values = [self._value(node, each, steps) for each in members]
        return UNKNOWN not in values and any(each != values[0] for each in values)

    def _value(self, node: ast.expr, member: Member, steps: int = 0) -> Any:
        """The value of an expression on a rank; UNKNOWN if something else than the ranks decides
        it.
        """
        if steps > _MOST_STEPS:
            return UNKNOWN
        if isinstance(node, ast.Name) and node.id in self.assigned:
            value = self._assigned(node.id, member, steps)
            is_size = node.id in _SIZES and self.assigned[node.id]
            return member.ranks if value is UNKNOWN and is_size else value
        if isinstance(node, ast.NamedExpr):
            return self._value(node.value, member, steps + 1)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            return self._named(node, member, steps)
        if isinstance(node, ast.IfExp):  # get_rank() if is_initialized() else 0
            holds = self._value(node.test, member, steps + 1)
            if holds is UNKNOWN:
                chosen = self._of_rank((node.body, node.orelse), steps + 1)
            else:
                chosen = node.body if holds else node.orelse
            return self._value(chosen, member, steps + 1) if chosen else UNKNOWN
        if isinstance(node, ast.Compare) and dotted(node.comparators[0]).endswith(
            "os.environ"
        ):
            known = constant(node.left) in _VARIABLES | _SIZE_VARIABLES
            return isinstance(node.ops[0], ast.In) if known else UNKNOWN
        return applied(node, lambda each: self._value(each, member, steps + 1))

    def _of_rank(self, given: Sequence[ast.expr], steps: int) -> ast.expr | None:
        """That alternative which depends on the rank, or on their number."""
        key = (*map(id, given), steps)
        if key not in self._depending:
            members = (*_PROBES, Member(0, _FEW, 1))
            differing = (each for each in given if self._differs(each, members, steps))
            self._depending[key] = next(differing, None)
        return self._depending[key]

    def _assigned(self, name: str, member: Member, steps: int) -> Any:
        """rank = 0, and where there is a process group rank = get_rank()."""
        if name not in self._without:
            others = {**self.assigned}
            del others[name]
            self._without[name] = RankTests(self.names, others)
        without = self._without[name]
        given = self.assigned[name]
        chosen = given[0] if len(given) == 1 else without._of_rank(given, steps + 1)
        return without._value(chosen, member, steps + 1) if chosen else UNKNOWN

    def _named(self, node: ast.expr, member: Member, steps: int) -> Any:
        """Of a variable, or of a call; of a function of this file, or an attribute that it sets,
        by the one expression that it stands for.
        """
        called = node.func if isinstance(node, ast.Call) else node
        given = [*node.args, *node.keywords] if isinstance(node, ast.Call) else []
        name = dotted(called)
        own = None if given else self.names.returned.get(name)
        if own is not None:
            value = self._of_module._value(own, member, steps + 1)
            sounds_like_rank = _SOUNDS_LIKE_RANK.search(text_of(own))
            of_a_matrix = name.endswith(".rank") and not sounds_like_rank
            if value is not UNKNOWN or of_a_matrix:
                return value
        if isinstance(node, ast.Subscript):
            return _of_environment(dotted(node.value), node.slice, member)
        kind = dotted(given[-1]) if given and name == "isinstance" else ""
        if kind.endswith("SingleDeviceStrategy"):
            return False
        if isinstance(node, ast.Call) and name in _OPERATIONS:
            return applied(node, lambda each: self._value(each, member, steps + 1))
        if name in ("os.environ.get", "os.getenv") and given:
            return _of_environment("os.environ", given[0], member)
        if given and last_part(name) not in _SIZES:
            return UNKNOWN  # of a group
        return self._by_name(called, member)

    @cached_property
    def _of_module(self) -> RankTests:
        of_module = self.names.assigned
        return self if self.assigned is of_module else RankTests(self.names, of_module)

    def _by_name(self, node: ast.expr, member: Member) -> Any:
        origin = self.names.origin(node)
        name = last_part(origin)
        if name in _NUMBERS:
            return member.rank
        if name in _FIRST:
            return member.rank == 0
        if name in _LAST:
            return member.rank == member.ranks - 1
        if name in _SIZES:
            return member.ranks
        if name in _DEVICES:
            return member.ranks // member.nodes
        if name in _NODES:
            return member.nodes
        if name in _ALONE:
            return False
        # Of accelerate.
        if name == "distributed_type" or origin.endswith("DistributedType.NO"):
            return "NO" if origin.endswith("NO") else "several"
        of_torch = name in _READY and origin.rpartition(".")[0].endswith(
            ("dist", "distributed", "comm")
        )
        return True if of_torch or name in _SEVERAL else UNKNOWN


def applied(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """The value of an operation, by those of its operands."""
    if isinstance(node, ast.Constant):
        return node.value
    operands = node.args if isinstance(node, ast.Call) else expressions(node)
    values = list(map(value, operands))
    if isinstance(node, ast.BoolOp):
        ends = isinstance(node.op, ast.Or)
        if any(bool(each) is ends for each in values if each is not UNKNOWN):
            return ends
        return UNKNOWN if UNKNOWN in values else not ends
    if UNKNOWN in values:
        return UNKNOWN
    try:
        if isinstance(node, ast.Compare):
            return all(map(_compared, node.ops, values, values[1:]))
        if isinstance(node, ast.Call):
            return _OPERATIONS[dotted(node.func)](*values)
        kind: Any = type(getattr(node, "op", node))
        return _OPERATIONS[kind](*values)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a text as a number
        return UNKNOWN


def _compared(operation: ast.cmpop, left: Any, right: Any) -> bool:
    return bool(_OPERATIONS[type(operation)](left, right))


def _of_environment(owner: str, key: ast.AST, member: Member) -> Any:
    name = constant(key) if owner.endswith("environ") else None
    if name in _SIZE_VARIABLES:
        return str(member.ranks)
    return str(member.rank) if name in _VARIABLES else UNKNOWN
