"""Which tests and loops of a function depend on this rank's batch, by its assignments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from nemo_patches.tools.doctor.syntax import (
    COMPREHENSIONS,
    DEFINITIONS,
    IDENTITIES,
    LOOPS,
    dotted,
    last_part,
    nodes,
    own_nodes,
    text_of,
    words,
)

Branching = ast.If | ast.While | ast.IfExp | ast.For | ast.comprehension | ast.BoolOp
Test = tuple[ast.expr, Branching]  # what decides, and the branch or the loop
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PRESENCE = (*IDENTITIES, ast.In, ast.NotIn)


class Level(IntEnum):
    """How surely a value differs between ranks: SHARED is the same on all, DATA comes from the
    batch, READ_OFF is read off its contents or shape. An argument of another name is UNKNOWN, and
    no more than that."""

    SHARED = 0
    UNKNOWN = 1
    DATA = 2
    READ_OFF = 3


_DATA_WORDS = words("""
    audio audios batch batches chunks data example examples feats features images input inputs
    items labels len length lengths lens logits losses loss mel metrics mels output outputs outs
    preds predictions sample samples segments signal signals spec target targets tokens
    transcripts wav wavs waveform waveforms x xs y results
    """)
_OTHER_WORDS = words("""
    by cfg config dataloader dim dir dtype fn func id idx index key kind limit loader max min
    mode name nb num path scale size step type weight weights use with is has return no
    """)
_BATCHES = words("batch batches data sample samples")
_LOADER_WORDS = words("batches dataloader dataset dl loader loaders")
_PLAIN_TYPES = words("bool float int str")
_READ_OFF = words("""
    all any count_nonzero isfinite isinf isnan item len max mean min nelement nonzero norm numel
    size sum tolist
    """)
# Other hosts may have others.
_OF_FILES = words("exists is_dir is_file isdir isfile listdir")
_OF_PROCESS = (
    "datetime.now",
    "monotonic",
    "perf_counter",
    "random.random",
    "random.uniform",
    "time.time",
    "torch.rand",
)
_STRUCTURE = words(
    "callable dim getattr hasattr id is_floating_point isinstance issubclass type"
)
_STRUCTURE_ATTRIBUTES = words(
    "device dtype is_complex is_cuda is_leaf is_meta is_sparse itemsize layout ndim"
    " requires_grad training"
)
_AGREED = words("""
    across agree agreed all_gather all_reduce allgather allreduce broadcast consensus dist
    distributed
    gather gathered rank ranks reduce reduced sync synced synchronize world
    """)
_OF_MODEL = words("""
    bias buf buffer buffers grad gradient gradients grads model module norm optimizer p param
    parameters params state weights
    """)
_OF_GRADIENTS = words("grad grads gradient gradients")
_OF_GROUPS = words("group groups mesh pg")
_OF_PARAMETER = ("bias", "grad", "weight")
_PLAUSIBLE_TEST = words("bad corrupt empty finite inf invalid nan valid")
_ADDING = (".append", ".extend", ".add")
_PASSED_ON = words("enumerate iter list reversed sorted tqdm tuple")
_OF_MAPPING = words("items keys values")
_SAME_COUNT = words("chunk items keys named_parameters parameters tensor_split values")


@dataclass
class DataFlow:
    """One walk over a function. agrees: whether a call gives all ranks the same; decides: whether
    it is one of a helper that decides by its arguments; accumulated: attributes that batches are
    added to; on_several: the tests that are decided where there are several ranks; of_rank: those
    on the rank.

    tests: those that depend on this rank's data, and the branch or the loop of each.
    """

    agrees: Callable[[ast.Call], bool]
    decides: Callable[[ast.Call], bool] = lambda call: False
    accumulated: frozenset[str] = frozenset()
    on_several: Mapping[int, bool | str] = field(default_factory=dict)
    of_rank: frozenset[int] = frozenset()
    tests: list[Test] = field(default_factory=list)
    # Calls, with what of the batch is in the name.
    named: list[tuple[ast.Call, ast.expr]] = field(default_factory=list)
    _levels: dict[str, Level] = field(default_factory=dict)
    _agreed: set[str] = field(default_factory=set)
    _optional: set[str] = field(default_factory=set)  # arguments that may be None
    # Lists whose length is known better than what is in them.
    _turns_of: dict[str, Level] = field(default_factory=dict)
    # Names of what a parameter has for a gradient.
    _gradients: set[str] = field(default_factory=set)
    _lettered: set[str] = field(default_factory=set)  # arguments of one letter
    _chosen: bool = False  # whether this rank's data decide if a statement is run

    def walk(self, function: ast.FunctionDef | ast.Module) -> None:
        """Collect the tests of a function, or of a module's own statements."""
        if not isinstance(function, ast.Module):
            self._arguments(function.args)
        self._block(function.body)

    def _arguments(self, arguments: ast.arguments) -> None:
        plain = [*arguments.posonlyargs, *arguments.args]
        missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
        defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
        for argument, default in zip(
            (*plain, *arguments.kwonlyargs), defaults, strict=True
        ):
            types = (
                {dotted(each) for each in ast.walk(argument.annotation)}
                if argument.annotation
                else set[str]()
            )
            constant = isinstance(default, ast.Constant) and default.value is not None
            # Gradients are the same on all ranks after backward.
            of_model = _words(argument.arg) & _OF_MODEL
            if (
                argument.arg in ("self", "cls")
                or constant
                or types & _PLAIN_TYPES
                or of_model
            ):
                self._levels[argument.arg] = Level.SHARED
            else:
                self._levels[argument.arg] = (
                    Level.DATA if _sounds_like_data(argument.arg) else Level.UNKNOWN
                )
            if len(argument.arg) == 1:
                self._lettered.add(argument.arg)
            if (
                isinstance(default, ast.Constant)
                and default.value is None
                and self._levels[argument.arg] == Level.DATA
            ):
                self._optional.add(argument.arg)

    # --- statements

    def _block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, DEFINITIONS):
            return
        if isinstance(statement, ast.Assign):
            self._expression(statement.value)
            for target in statement.targets:
                self._assign(target, statement.value)
        elif isinstance(statement, ast.If):
            self._if(statement)
        elif isinstance(statement, (ast.While, ast.For)):
            if isinstance(statement, ast.While):
                self._test(statement, statement.test)
            else:
                self._expression(statement.iter)
                self._loop(statement, statement.target, statement.iter)
            outer = self._chosen
            self._branches([statement.body, []])
            self._chosen = outer
            self._block(statement.orelse)
        elif isinstance(statement, ast.Try):
            self._block(statement.body)
            self._block(statement.orelse)
            self._branches([*(handler.body for handler in statement.handlers), []])
            self._block(statement.finalbody)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                self._expression(item.context_expr)
            self._block(statement.body)
        else:
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    self._expression(child, alone=isinstance(statement, ast.Expr))

    def _if(self, statement: ast.If) -> None:
        decided = self.on_several.get(id(statement))
        if isinstance(decided, bool):
            self._expression(statement.test)
            return self._block(statement.body if decided else statement.orelse)
        self._test(statement, statement.test)
        outer = self._chosen
        of_data = self.is_data(statement.test)
        self._chosen = outer or of_data
        # Every n steps: then they have not agreed on the others.
        at_times = any(nodes(statement.test, ast.Mod))
        self._branches([statement.body, statement.orelse], agreeing=not at_times)
        left = any(
            isinstance(each, (ast.Continue, ast.Break)) for each in statement.body
        )
        if not left:  # or else what follows in this turn is chosen, too
            self._chosen = outer
        of_rank = id(statement) in self.of_rank
        for block in (statement.body, statement.orelse) if of_data or of_rank else ():
            if block and not isinstance(block[-1], _LEAVING):
                self._differ(block, any_value=of_rank)
        return None

    def _differ(self, block: Iterable[ast.stmt], *, any_value: bool) -> None:
        """What a block sets that not all ranks run."""
        for statement in block:
            for each in nodes(statement, ast.Assign):
                value = getattr(each.value, "right", each.value)  # of n = n + 1
                constant = isinstance(value, ast.Constant) and value.value is not None
                if any_value or constant:
                    names = {*map(dotted, each.targets)} - self._agreed
                    for name in names:
                        self._levels[name] = Level.READ_OFF
                        self._turns_of.setdefault(name, Level.SHARED)

    def _branches(
        self, blocks: Iterable[Iterable[ast.stmt]], *, agreeing: bool = True
    ) -> None:
        """agreeing: whether what ranks agree on in a block is agreed on behind it."""
        before = self._levels
        agreed = self._agreed
        after = dict[str, Level]()
        agreed_after = set(agreed)
        for block in blocks:
            self._levels = dict(before)
            self._agreed = set(agreed)
            self._block(block)
            made = {
                name
                for name, level in self._levels.items()
                if level < before.get(name, Level.SHARED)
            }
            if agreeing and self._agreed - agreed:
                agreed_after |= self._agreed | made
            for name, level in self._levels.items():
                after[name] = max(level, after.get(name, Level.SHARED))
        # What a process group has agreed on is the same on all ranks; without a group there are no
        # others.
        self._levels = after | dict.fromkeys(agreed_after, Level.SHARED)
        self._agreed = agreed_after

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for inner in target.elts:
                self._assign(inner, value)
            return
        level = self.level(value)
        if isinstance(target, ast.Name):
            if self._is_gradient(value):
                self._gradients.add(target.id)
            self._turns_of.pop(target.id, None)
            self._lettered.discard(target.id)
            if (
                isinstance(value, (ast.List, ast.ListComp, ast.Call))
                and (turns := self._turns(value)) < level
            ):
                self._turns_of[target.id] = turns
        drawn = isinstance(value, ast.Call) and dotted(value.func) == "next"
        if drawn and _sounds_like_data(dotted(target)):
            level = Level.DATA
        self._set(target, level)

    def _set(self, target: ast.expr, level: Level) -> None:
        if isinstance(target, ast.Starred):
            target = target.value
        if isinstance(target, (ast.Name, ast.Attribute)):
            name = dotted(target)
            self._levels[name] = level
            self._agreed.discard(name)

    def _loop(self, node: Branching, target: ast.expr, iterated: ast.expr) -> None:
        if self._turns(iterated) >= Level.DATA:
            self.tests.append((iterated, node))
        self._draw(target, iterated)

    def _draw(self, target: ast.expr, iterated: ast.expr) -> None:
        """Set the levels of a loop's variables."""
        if isinstance(iterated, ast.Call) and iterated.args:
            name = last_part(dotted(iterated.func))
            if (
                name == "enumerate"
                and isinstance(target, ast.Tuple)
                and len(target.elts) == 2
            ):
                self._set(target.elts[0], Level.SHARED)
                return self._draw(target.elts[1], iterated.args[0])
            if (
                name == "zip"
                and isinstance(target, ast.Tuple)
                and len(target.elts) == len(iterated.args)
            ):
                for inner, its in zip(target.elts, iterated.args, strict=True):
                    self._draw(inner, its)
                return None
            if name in _PASSED_ON:
                return self._draw(target, iterated.args[0])
        if isinstance(iterated, ast.Call) and dotted(iterated.func).endswith(
            (".items", ".keys")
        ):
            key, *values = (isinstance(target, ast.Tuple) and target.elts) or [target]
            self._set(key, Level.SHARED)  # which keys there are is the data set's
            for value in values:
                self._set(value, self.level(iterated))
                if self._is_gradient(iterated):
                    self._gradients.add(dotted(value))
            return None
        level = self.level(iterated)
        text = _words(text_of(iterated))
        if level < Level.DATA and is_loader(iterated):
            level = Level.DATA
        elif level == Level.UNKNOWN and text & {*_OF_MODEL, "tensors"}:
            level = Level.SHARED
        if isinstance(iterated, ast.Call) and dotted(iterated.func) == "range":
            level = Level.SHARED
        for each in nodes(target, ast.Name):
            self._set(each, level)
            if self._is_gradient(iterated):
                self._gradients.add(each.id)
        return None

    def _turns(self, iterated: ast.expr) -> Level:
        """How surely ranks differ in how often they go round."""
        if isinstance(iterated, (ast.Tuple, ast.List, ast.Constant, ast.Dict)):
            return Level.SHARED
        if isinstance(iterated, ast.Name) and iterated.id in self._turns_of:
            return self._turns_of[iterated.id]
        if isinstance(iterated, ast.Name) and iterated.id in self._lettered:
            return Level.UNKNOWN  # x may be a list of parameters
        if isinstance(iterated, ast.ListComp) and not any(
            each.ifs for each in iterated.generators
        ):
            return max(self._turns(each.iter) for each in iterated.generators)
        if isinstance(iterated, ast.Call):
            name = last_part(dotted(iterated.func))
            if self.decides(iterated):
                return Level.READ_OFF
            if name in _SAME_COUNT:
                chosen = name in _OF_MAPPING and self.level(iterated) == Level.READ_OFF
                return Level.READ_OFF if chosen else Level.SHARED
            if name == "zip":
                return min(map(self._turns, iterated.args), default=Level.SHARED)
            if name in _PASSED_ON and iterated.args:
                return self._turns(iterated.args[0])
        return self.level(iterated)

    # --- expressions

    def _expression(self, node: ast.expr, alone: bool = False) -> None:
        """Collect what an expression has of tests, loops and collectives."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.IfExp):
                self._test(inner, inner.test)
            elif isinstance(inner, ast.BoolOp):
                if self.is_data(inner.values[0]):
                    self.tests.append((inner.values[0], inner))
            elif isinstance(inner, COMPREHENSIONS):
                for each in inner.generators:
                    self._loop(each, each.target, each.iter)
                    self.tests += [
                        (test, each) for test in each.ifs if self.is_data(test)
                    ]
            elif (
                isinstance(inner, ast.Call)
                and inner.args
                and isinstance(inner.args[0], ast.JoinedStr)
            ):
                parts = [
                    each.value
                    for each in inner.args[0].values
                    if isinstance(each, ast.FormattedValue)
                ]
                self.named += [(inner, part) for part in parts if self._of_batch(part)][
                    :1
                ]
            elif isinstance(inner, ast.Call) and (
                self.agrees(inner) or (alone and _sounds_agreed(inner))
            ):
                for argument in inner.args:
                    self._agree(argument)
            elif (
                self._chosen
                and isinstance(inner, ast.Call)
                and dotted(inner.func).endswith(_ADDING)
            ):
                owner = dotted(inner.func).rpartition(".")[0]
                self._levels[owner] = Level.READ_OFF
                self._turns_of.pop(owner, None)

    def _agree(self, node: ast.expr) -> None:
        for name in map(dotted, nodes(node, ast.Name, ast.Attribute)):
            if not name.startswith("()"):
                self._levels[name] = Level.SHARED
                self._agreed.add(name)

    def level(self, node: ast.expr) -> Level:
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = dotted(node)
            if name in self._levels:
                return self._levels[name]
            if name in self.accumulated:
                return Level.DATA
            if isinstance(node, ast.Attribute) and name.rpartition(".")[0] != "self":
                if node.attr in _STRUCTURE_ATTRIBUTES or node.attr in _OF_PARAMETER:
                    return Level.SHARED
                inner = self.level(node.value)
                return Level.READ_OFF if node.attr == "shape" and inner else inner
            return Level.SHARED
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.DictComp) and any(
            self.is_data(test) for each in node.generators for test in each.ifs
        ):
            return Level.READ_OFF
        # Which keys a batch has is the data set's.
        if isinstance(node, (ast.Constant, ast.Lambda, ast.DictComp)):
            return Level.SHARED
        if isinstance(node, ast.Compare):
            presence = all(isinstance(each, _PRESENCE) for each in node.ops)
            if (
                presence
                and not self._asks_for_batch(node)
                and not self._asks_for_gradient(node)
            ):
                return Level.SHARED
            return (
                Level.READ_OFF
                if self.is_data(node)
                else max(map(self.level, (node.left, *node.comparators)))
            )
        if isinstance(node, ast.Subscript):
            of_model = (
                isinstance(node.slice, ast.Constant)
                and _words(str(node.slice.value)) & _OF_MODEL
            )
            return Level.SHARED if of_model else self.level(node.value)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            levels = [self.level(each.iter) for each in node.generators]
            for each in node.generators:
                self._draw(each.target, each.iter)
            tests = [test for each in node.generators for test in each.ifs]
            chosen = (tests and max(levels) >= Level.DATA) or any(
                map(self.is_data, tests)
            )
            return Level.READ_OFF if chosen else max(*levels, self.level(node.elt))
        if isinstance(node, ast.IfExp):
            decided = self.on_several.get(id(node))
            if isinstance(decided, bool):
                return self.level(node.body if decided else node.orelse)
            return max(self.level(node.body), self.level(node.orelse))
        children = (
            child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
        )
        return max(map(self.level, children), default=Level.SHARED)

    def _call(self, node: ast.Call) -> Level:
        name = dotted(node.func)
        last = last_part(name)
        if (
            self.agrees(node)
            or last in _STRUCTURE
            or _sounds_agreed(node)
            or _words(last) & _OF_GRADIENTS
            or _words(name) & _OF_GROUPS
        ):
            return Level.SHARED
        if last in _OF_FILES or name.endswith(_OF_PROCESS):
            return Level.READ_OFF
        if name == "filter":
            test = node.args[0]
            of_gradients = self._is_gradient(node.args[-1])
            if isinstance(test, ast.Lambda):
                if of_gradients:
                    self._gradients |= {argument.arg for argument in test.args.args}
                if self.is_data(test.body):
                    return Level.READ_OFF
            elif of_gradients:  # filter(None, ...)
                return Level.READ_OFF
        if last == "len" and node.args and last_part(dotted(node.args[0])) == "shape":
            return Level.SHARED  # the number of dimensions
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        values = [*owner, *node.args, *(keyword.value for keyword in node.keywords)]
        level = max(map(self.level, values), default=Level.SHARED)
        # len(losses) is read off a batch, len(parameters) need not be; an argument with a method
        # .any() is a tensor.
        enough = Level.DATA if isinstance(node.func, ast.Name) else Level.UNKNOWN
        return Level.READ_OFF if last in _READ_OFF and level >= enough else level

    def _test(self, node: ast.If | ast.While | ast.IfExp, test: ast.expr) -> None:
        self._expression(test)
        if self.is_data(test) and not isinstance(self.on_several.get(id(node)), bool):
            self.tests.append((test, node))

    def is_data(self, test: ast.expr) -> bool:
        """Whether what a test says depends on what is in the batch, and not only on whether it has
        something.
        """
        if isinstance(test, ast.BoolOp):
            return any(map(self.is_data, test.values))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_data(test.operand)
        if isinstance(test, ast.NamedExpr):
            return self.is_data(test.value)
        if isinstance(test, ast.Compare):
            return self._compares_data(test)
        level = self.level(test)
        if level == Level.READ_OFF:
            return True
        if isinstance(test, ast.Call):
            plausible = _words(dotted(test.func)) & _PLAUSIBLE_TEST
            if _words(dotted(test.func)) & _OF_GRADIENTS and self.decides(test):
                return True
            return level == Level.DATA and (bool(plausible) or self.decides(test))
        if isinstance(test, ast.Name) and test.id in self._optional:
            return False  # whether it was given
        return (
            level == Level.DATA
            and isinstance(test, (ast.Name, ast.Attribute))
            and _sounds_like_data(dotted(test))
        )

    def _of_batch(self, node: ast.expr) -> bool:
        """Whether a text is taken from the batch itself."""
        names = {each.id for each in nodes(node, ast.Name)}
        return not names.isdisjoint(_BATCHES) and self.level(node) >= Level.DATA

    def _asks_for_batch(self, test: ast.Compare) -> bool:
        """Whether it asks if there is a batch at all: a collate function may have dropped all of
        its samples.
        """
        batch = (
            isinstance(test.left, ast.Name)
            and test.left.id in _BATCHES
            and test.left.id not in self._optional
        )
        return batch and _with_none(test) and self.level(test.left) >= Level.DATA

    def _is_gradient(self, node: ast.expr) -> bool:
        """Whether it is what a parameter has for a gradient, or a list of such."""
        if isinstance(node, (ast.NamedExpr, ast.DictComp)):
            return self._is_gradient(node.value)
        if isinstance(node, COMPREHENSIONS):
            return self._is_gradient(node.elt)
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr":
            return any(
                isinstance(each, ast.Constant) and each.value == "grad"
                for each in node.args
            )
        if isinstance(node, ast.Call) and dotted(node.func) == "map":
            mapped = node.args[0]
            return isinstance(mapped, ast.Lambda) and self._is_gradient(mapped.body)
        if isinstance(node, ast.Call) and dotted(node.func).endswith(
            (".items", ".values")
        ):
            return self._is_gradient(node.func.value)
        return dotted(node).endswith(".grad") or (
            isinstance(node, ast.Name) and node.id in self._gradients
        )

    def _asks_for_gradient(self, test: ast.Compare) -> bool:
        """Whether it asks if a parameter has a gradient: without one is what a rank's batch does
        not use.
        """
        return self._is_gradient(test.left) and _with_none(test)

    def _compares_data(self, test: ast.Compare) -> bool:
        if self._asks_for_batch(test) or self._asks_for_gradient(test):
            return True
        if any(isinstance(each, _PRESENCE) for each in test.ops):
            return False
        sides = (test.left, *test.comparators)
        if any(
            _is_text(each) or _shape_of_feature(each) for each in sides
        ) or _counts_fields(sides):
            return False
        levels = [self.level(each) for each in sides]
        itself = (
            ast.unparse(test.left) == ast.unparse(test.comparators[0])
            and Level.DATA in levels
        )  # NaN
        if Level.READ_OFF in levels or itself:
            return True
        ordering = any(
            isinstance(each, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for each in test.ops
        )
        return ordering and Level.DATA in levels


def _words(name: str) -> set[str]:
    name = name.lower()
    return {*re.split(r"[\W_]+", name), *name.split(".")}


def is_loader(node: ast.expr) -> bool:
    return bool(_words(text_of(node)) & _LOADER_WORDS)


def _sounds_like_data(name: str) -> bool:
    parts = _words(last_part(name))
    return bool(parts & _DATA_WORDS) and not parts & _OTHER_WORDS


def _sounds_agreed(call: ast.Call) -> bool:
    return bool(_words(last_part(dotted(call.func))) & _AGREED)


def _with_none(test: ast.Compare) -> bool:
    return (
        isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, type(None)))


def _counts_fields(sides: Sequence[ast.expr]) -> bool:
    """Whether it asks how many tensors a batch has, and not how many samples: `len(batch) > 4`."""
    counts = [
        each
        for each in sides
        if isinstance(each, ast.Call) and dotted(each.func) == "len" and each.args
    ]
    numbers = [
        each.value
        for each in sides
        if isinstance(each, ast.Constant) and isinstance(each.value, int)
    ]
    return (
        bool(counts)
        and isinstance(counts[0].args[0], ast.Name)
        and any(number > 1 for number in numbers)
    )


def _shape_of_feature(node: ast.expr) -> bool:
    """Whether it is the number of features, which is the model's: `x.shape[-1]`; or a shape as a
    whole.
    """
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return True
    if isinstance(node, ast.Subscript) and dotted(node.value).endswith(".shape"):
        return isinstance(node.slice, ast.UnaryOp)
    last = (
        isinstance(node, ast.Call)
        and dotted(node.func).endswith(".size")
        and bool(node.args)
    )
    return last and isinstance(node.args[0], ast.UnaryOp)  # type: ignore[attr-defined]


def assignments(function: ast.AST) -> Mapping[str, list[ast.expr]]:
    """What each name of a function is assigned; nothing for a loop's variable."""
    found: dict[str, list[ast.expr]] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            found.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, LOOPS):
            found |= {each.id: [] for each in nodes(node.target, ast.Name)}
    return found
