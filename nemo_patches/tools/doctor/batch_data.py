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
    constant,
    dotted,
    expressions,
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
_LOADERS = words("dataloader dl loader loaders")
_LOADER_WORDS = _LOADERS | {"batches", "dataset"}
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
    " requires_grad training world_size"
)
_AGREED = words("""
    across agree agreed all_gather all_reduce allgather allreduce broadcast consensus dist
    distributed
    gather gathered rank ranks reduce reduced sync synced synchronize world
    """)
_OF_MODEL = words("""
    bias buf buffer buffers grad gradient gradients grads model module norm optimizer p param
    parameters params state weight weights
    """)
_OF_GRADIENTS = words("grad grads gradient gradients")
_OF_GROUPS = words("group groups mesh pg")
_OF_PARAMETER = ("bias", "grad", "weight")
_PLAUSIBLE_TEST = words("bad corrupt empty finite inf invalid nan valid")
_FEATURE = re.compile(r".*\.(shape(\[-\w+\])?|size\(-\w+\))", re.DOTALL)
_READING = words("""
    all_gather all_gather_into_tensor all_gather_object gather gather_for_metrics gather_object
    reduce
    """)
_ADDING = ("append", "extend", "add")
_TURNS = 2
_MOST_NESTED = 3  # loops that are walked in two turns
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
    decides: Callable[[ast.Call], bool]
    accumulated: frozenset[str]
    on_several: Mapping[int, bool | str]
    of_rank: frozenset[int]
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
    _once_none: set[str] = field(default_factory=set)  # names that None is given to
    _of_one_rank: set[str] = field(default_factory=set)  # names that a rank alone sets
    _depth: int = 0  # loops around a statement
    _chosen: bool = False  # whether this rank's data decide if a statement is run

    def walk(self, function: ast.FunctionDef | ast.Module) -> None:
        """Collect the tests of a function, or of a module's own statements."""
        if not isinstance(function, ast.Module):
            self._arguments(function.args)
        self._block(function.body)

    def _arguments(self, arguments: ast.arguments) -> None:
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        defaults = [*arguments.defaults, *arguments.kw_defaults]
        missing = len(given) - len(defaults)
        for argument, default in zip(given, [None] * missing + defaults, strict=True):
            name = argument.arg
            types = {dotted(each) for each in ast.walk(argument)}
            level = Level.DATA if _sounds_like_data(name) else Level.UNKNOWN
            # Gradients are the same on all ranks after backward.
            if (
                constant(default) is not None
                or types & _PLAIN_TYPES
                or _words(name) & (_OF_MODEL | _AGREED)
                or name in ("self", "cls")
            ):
                level = Level.SHARED
            self._levels[name] = level
            if len(name) == 1:
                self._lettered.add(name)
            if isinstance(default, ast.Constant) and level == Level.DATA:
                self._optional.add(name)

    # --- statements

    def _block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, DEFINITIONS):
            return
        if isinstance(statement, ast.If):
            self._if(statement)
        elif isinstance(statement, ast.While):
            self._test(statement, statement.test)
            self._turn(statement.body)
            self._test(statement, statement.test)  # by what the turn has set
            self._block(statement.orelse)
        elif isinstance(statement, ast.For):
            self._expression(statement.iter)
            self._loop(statement, statement.target, statement.iter)
            self._turn(statement.body)
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
            for child in expressions(statement):
                self._expression(child, alone=isinstance(statement, ast.Expr))
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._assign(target, statement.value)

    def _turn(self, body: Iterable[ast.stmt]) -> None:
        """A loop's body; twice, as what a turn sets may be asked for in the next one."""
        outer = self._chosen
        agreed = self._agreed
        self._depth += 1
        for _ in range(_TURNS if self._depth <= _MOST_NESTED else 1):
            self._agreed = agreed
            self._branches([body, []])
            self._chosen = outer
        self._depth -= 1

    def _if(self, statement: ast.If) -> None:
        decided = self.on_several.get(id(statement))
        if isinstance(decided, bool):
            self._expression(statement.test)
            self._block(statement.body if decided else statement.orelse)
            return
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
        asks_for_files = _OF_FILES & {*re.findall(r"\w+", text_of(statement.test))}
        differs = of_rank or (of_data and not asks_for_files)
        for block in (statement.body, statement.orelse) if differs else ():
            if block and not isinstance(block[-1], _LEAVING):
                self._differ(block, any_value=of_rank)

    def _differ(self, block: Iterable[ast.stmt], *, any_value: bool) -> None:
        """What a block sets that not all ranks run."""
        for statement in block:
            for each in nodes(statement, ast.Assign):
                value = getattr(each.value, "right", each.value)  # of n = n + 1
                if any_value or constant(value) is not None:
                    names = {*map(_variable, each.targets)} - self._agreed
                    if any_value:
                        self._of_one_rank |= names
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
        if text_of(value) == "None":
            self._once_none.add(dotted(target))
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
        if _called(value) == "next" and _sounds_like_data(dotted(target)):
            level = Level.DATA
        self._set(target, level)

    def _set(self, target: ast.expr, level: Level) -> None:
        name = _variable(target)
        if name.startswith("()"):
            return
        if isinstance(target, ast.Subscript):
            level = max(level, self.level(target.value))
        self._levels[name] = level
        self._agreed.discard(name)

    def _loop(self, node: Branching, target: ast.expr, iterated: ast.expr) -> None:
        if self._turns(iterated) >= Level.DATA:
            self.tests.append((iterated, node))
        self._draw(target, iterated)

    def _draw(self, target: ast.expr, iterated: ast.expr) -> None:
        """Set the levels of a loop's variables."""
        name = _called(iterated)
        given = iterated.args if isinstance(iterated, ast.Call) else []
        parts = getattr(target, "elts", [target])
        if name == "zip" and len(parts) == len(given):
            for inner, its in zip(parts, given, strict=True):
                self._draw(inner, its)
            return
        if name in _PASSED_ON and given:
            if name == "enumerate" and len(parts) > 1:
                self._set(parts[0], Level.SHARED)
                target = parts[1]
            self._draw(target, given[0])
            return
        level = self.level(iterated)
        if name in ("items", "keys"):  # which keys there are is the data set's
            self._set(parts[0], Level.SHARED)
            parts = parts[1:]
        elif level < Level.DATA and is_loader(iterated):
            level = Level.DATA
        elif name == "range" or (
            level == Level.UNKNOWN
            and _words(text_of(iterated)) & {*_OF_MODEL, "tensors"}
        ):
            level = Level.SHARED
        for each in (each for part in parts for each in nodes(part, ast.Name)):
            self._set(each, level)
            if self._is_gradient(iterated):
                self._gradients.add(each.id)

    def _turns(self, iterated: ast.expr) -> Level:
        """How surely ranks differ in how often they go round."""
        if isinstance(iterated, (ast.Tuple, ast.List, ast.Constant, ast.Dict)):
            return Level.SHARED
        name = dotted(iterated)
        if name in self._turns_of:
            return self._turns_of[name]
        if name in self._lettered:
            return Level.UNKNOWN  # x may be a list of parameters
        if isinstance(iterated, ast.ListComp) and not any(
            each.ifs for each in iterated.generators
        ):
            return max(self._turns(each.iter) for each in iterated.generators)
        if isinstance(iterated, ast.Call):
            name = _called(iterated)
            if self.decides(iterated):
                return Level.READ_OFF
            if name in _SAME_COUNT:
                chosen = name in _OF_MAPPING and self.level(iterated) == Level.READ_OFF
                return Level.READ_OFF if chosen else Level.SHARED
            if name == "zip":
                return min(map(self._turns, iterated.args), default=Level.SHARED)
            if name in _PASSED_ON and iterated.args:
                return self._turns(iterated.args[0])
        level = self.level(iterated)
        loads = level == Level.DATA and _words(name) & _LOADERS
        return Level.UNKNOWN if loads else level

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
            elif isinstance(inner, ast.Call):
                self._made(inner, alone)

    def _made(self, call: ast.Call, alone: bool) -> None:
        owner, _, last = dotted(call.func).rpartition(".")
        if call.args and isinstance(call.args[0], ast.JoinedStr):
            parts = (each.value for each in nodes(call.args[0], ast.FormattedValue))
            self.named += [(call, part) for part in parts if self._of_batch(part)][:1]
        elif self.agrees(call) or (alone and _sounds_agreed(call)):
            for each in _made_equal(call):
                self._agree(each)
        elif self._chosen and last in _ADDING:
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
        if isinstance(node, ast.Lambda):
            return Level.SHARED
        if isinstance(node, ast.Compare):
            if self.is_data(node):
                return Level.READ_OFF
            if _is_presence(node):
                return Level.SHARED
        if isinstance(node, ast.Subscript):
            named = isinstance(node.slice, ast.Constant)
            of_model = named and _words(text_of(node.slice)) & _OF_MODEL
            return Level.SHARED if of_model else self.level(node.value)
        if isinstance(node, COMPREHENSIONS):
            levels = [self.level(each.iter) for each in node.generators]
            for each in node.generators:
                self._draw(each.target, each.iter)
            tests = [test for each in node.generators for test in each.ifs]
            if any(map(self.is_data, tests)):
                return Level.READ_OFF
            if isinstance(node, ast.DictComp):  # which keys there are is the data set's
                return Level.SHARED
            chosen = tests and max(levels) >= Level.DATA
            return Level.READ_OFF if chosen else max(*levels, self.level(node.elt))
        decided = self.on_several.get(id(node))
        if isinstance(node, ast.IfExp) and isinstance(decided, bool):
            return self.level(node.body if decided else node.orelse)
        return max(map(self.level, expressions(node)), default=Level.SHARED)

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
        if name == "filter" and node.args:
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
        plain = isinstance(node.func, ast.Name) or last == "tolist"
        enough = Level.DATA if plain else Level.UNKNOWN
        return Level.READ_OFF if last in _READ_OFF and level >= enough else level

    def _test(self, node: ast.If | ast.While | ast.IfExp, test: ast.expr) -> None:
        self._expression(test)
        if self.is_data(test) and not isinstance(self.on_several.get(id(node)), bool):
            self.tests.append((test, node))

    def is_data(self, test: ast.expr) -> bool:
        """Whether what a test says depends on what is in the batch, and not only on whether it has
        something.
        """
        if isinstance(test, (ast.BoolOp, ast.UnaryOp, ast.NamedExpr)):
            return any(map(self.is_data, expressions(test)))
        if isinstance(test, ast.Compare):
            return self._compares_data(test)
        level = self.level(test)
        if level == Level.READ_OFF:
            return True
        if isinstance(test, ast.Call):
            named = _words(dotted(test.func))
            if named & _OF_GRADIENTS or level == Level.DATA:
                plausible = level == Level.DATA and bool(named & _PLAUSIBLE_TEST)
                return plausible or self.decides(test)
        name = dotted(test)  # not one of which is asked if it was given
        known = level == Level.DATA and name not in self._optional
        return known and _sounds_like_data(name)

    def _of_batch(self, node: ast.expr) -> bool:
        """Whether a text is taken from the batch itself."""
        names = {each.id for each in nodes(node, ast.Name)}
        return not names.isdisjoint(_BATCHES) and self.level(node) >= Level.DATA

    def _asks_for_none(self, test: ast.Compare) -> bool:
        """Whether it asks if something is None that may be so on some ranks only: a batch, whose
        samples a collate function may all have dropped; what one rank alone has set; a gradient,
        of a parameter that a rank's batch does not use.
        """
        if text_of(test.comparators[0]) != "None":
            return False
        name = dotted(test.left)
        level = self.level(test.left)
        batch = name in _BATCHES - self._optional and level >= Level.DATA
        of_one_rank = name in self._once_none & self._of_one_rank
        if batch or (of_one_rank and level == Level.READ_OFF):
            return True
        return self._is_gradient(test.left)

    def _is_gradient(self, node: ast.expr) -> bool:
        """Whether it is what a parameter has for a gradient, or made of such."""
        name = dotted(node)
        literal = constant(node) == "grad"
        if name.endswith(".grad") or name in self._gradients or literal:
            return True
        return any(map(self._is_gradient, expressions(node)))

    def _compares_data(self, test: ast.Compare) -> bool:
        if self._asks_for_none(test):
            return True
        sides = (test.left, *test.comparators)
        of_model = any(
            text_of(each) == "None"
            or isinstance(constant(each), str)
            or _shape_of_feature(each)
            for each in sides
        )
        if of_model or _is_presence(test) or _counts_fields(sides):
            return False
        levels = [self.level(each) for each in sides]
        if Level.READ_OFF in levels:
            return True
        ordering = any(
            isinstance(each, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for each in test.ops
        )
        itself = text_of(test.left) == text_of(sides[1])  # NaN
        return (ordering or itself) and Level.DATA in levels


def _words(name: str) -> set[str]:
    name = name.lower()
    return {*re.split(r"[\W_]+", name), *name.split(".")}


def is_loader(node: ast.expr) -> bool:
    return bool(_words(text_of(node)) & _LOADER_WORDS)


def _sounds_like_data(name: str) -> bool:
    parts = _words(last_part(name))
    return bool(parts & _DATA_WORDS) and not parts & _OTHER_WORDS


def _called(node: ast.expr) -> str:
    """The last part of the name that a call calls; empty of anything else."""
    return last_part(dotted(node.func)) if isinstance(node, ast.Call) else ""


def _variable(target: ast.expr) -> str:
    """What an assignment sets, as a whole or in an element by its number."""
    if isinstance(target, ast.Starred):
        return dotted(target.value)
    if isinstance(target, ast.Subscript) and isinstance(constant(target.slice), int):
        return dotted(target.value)
    return dotted(target)


def _made_equal(call: ast.Call) -> list[ast.expr]:
    """What is the same on all ranks after a collective: not what is only read by it."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    last = _called(call)
    if last not in _READING:
        return given
    return given[:1] if last.startswith("all_") and len(given) > 1 else []


def _sounds_agreed(call: ast.Call) -> bool:
    return bool(_words(_called(call)) & _AGREED)


def _is_presence(test: ast.Compare) -> bool:
    return any(isinstance(each, _PRESENCE) for each in test.ops)


def _counts_fields(sides: Sequence[ast.expr]) -> bool:
    """Whether it asks how many tensors a batch has, and not how many samples: `len(batch) > 4`."""
    counts = any(re.fullmatch(r"len\(\w+\)", text_of(each)) for each in sides)
    numbers = map(constant, sides)
    return counts and any(isinstance(each, int) and each > 1 for each in numbers)


def _shape_of_feature(node: ast.expr) -> bool:
    """Whether it is the number of features, which is the model's: `x.shape[-1]`; or a shape as a
    whole.
    """
    plain = isinstance(node, (ast.Attribute, ast.Subscript, ast.Call))
    return plain and bool(_FEATURE.fullmatch(text_of(node)))


def assignments(
    function: ast.AST, *, drawn: bool = False
) -> Mapping[str, list[ast.expr]]:
    """What each name of a function is assigned; for a loop's variable nothing, or, where drawn is
    true, what is iterated, too.
    """
    found: dict[str, list[ast.expr]] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            found.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, LOOPS):
            for each in nodes(node.target, ast.Name):
                known = found.get(each.id, [])
                found[each.id] = [*known, node.iter] if drawn else []
    return found
