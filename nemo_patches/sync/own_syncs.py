"""Classes with their own length sync: a subclass that overrides the bounded one never calls ours. Named once.

Whether an override waits for other ranks is read off its code: the names that it uses, and the helpers that they lead
to. Nothing of it is run, and what cannot be looked into is said to be not known.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dis
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from .places import function_of, is_ours, layers, line_of, place_of
from .rank_log import raised_by_signal_handler, report

_COLLECTIVES = {
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor"),
}
_ALSO_OF_TENSORS = {"broadcast", "gather", "reduce", "scatter"}  # collectives where torch.distributed is in sight
_NOT_OF_TENSORS = {"broadcast", "reduce"}  # on what is not known, these are Lightning's strategies', and wait
_LIMITED = {"wait", "monitored_barrier"}  # these may have a limit in time
_LIBRARIES = {"torch", "numpy", "nemo", "lightning", "pytorch_lightning", "nemo_patches", *sys.stdlib_module_names}
_KNOWN = (torch, torch.Tensor, torch.distributed, str, list, dict, set, logging.Logger)  # whose methods are no mystery
_MOST_FUNCTIONS = 50  # that are read of one override
_said: set[str] = set()  # texts: a class that is made anew, by a reload or a decorator, is the same one


class Owner(NamedTuple):
    """A class with the bounded sync. setter: the method that grows the buffers; empty where `method` does so itself."""

    kind: type
    method: str
    setter: str


class OwnSync(NamedTuple):
    """A method that replaces the bounded sync. certain: it has a collective; otherwise it is unknown if it waits."""

    title: str  # the class's and its own name
    certain: bool
    text: str  # all that is to be said


def own_syncs(owner: Owner) -> tuple[OwnSync, ...]:
    """Of all its subclasses that there are."""
    return tuple(own for kind in _subclasses(owner.kind) for own in _of(kind, owner))


def copies(methods: Iterable[str], nemos: Set[tuple[str, str]]) -> tuple[OwnSync, ...]:
    """Of classes that have such a method with a collective, but are none of NeMo's, by module and name, nor below."""
    alike = [Owner(torch.nn.Module, method, "") for method in methods]
    kinds = [kind for kind in _subclasses(torch.nn.Module) if any(owner.method in _namespace(kind) for owner in alike)]
    # By name: a module that was imported anew leaves its old classes behind.
    others = [kind for kind in kinds if not any(_name(base) in nemos for base in _mro(kind))]
    return tuple(own for kind in others for owner in alike for own in _of(kind, owner) if own.certain)


def say(found: Iterable[OwnSync]) -> None:
    """Log one line for each, once. A spawned data loader worker has the classes, too; its rank has logged them."""
    for own in found:
        if own.text not in _said and not multiprocessing.current_process().daemon:
            _said.add(own.text)
            report(logging.WARNING, own.text)


def watching(owner: Owner, in_force: Callable[[], bool]) -> classmethod[Any, Any, None]:
    """The `__init_subclass__` of an owner: looks at each subclass when it is made, after what there was before."""
    kind: Any = owner.kind
    before = vars(kind).get("__init_subclass__")

    def __init_subclass__(cls: type, /, **keywords: Any) -> None:
        if before is None:
            super(kind, cls).__init_subclass__(**keywords)
        else:
            before.__get__(None, cls)(**keywords)
        try:
            say(_of(cls, owner) if in_force() else ())
        except Exception as error:  # nothing of ours may break a class statement; status() looks again
            if raised_by_signal_handler(error):
                raise

    return classmethod(__init_subclass__)


def _subclasses(kind: type) -> list[type]:
    found, rest = dict[int, type](), [kind]  # by id: a metaclass may have its own idea of what is equal
    while rest:
        below: list[type] = type.__subclasses__(rest.pop())
        new = [each for each in below if id(each) not in found]
        found.update({id(each): each for each in new})
        rest += new
    return list(found.values())


def _is_below(kind: type, base: type) -> bool:
    """issubclass(), without the ideas of a metaclass: abc's wants a class that has a hash."""
    return any(each is base for each in _mro(kind))


def _mro(kind: type) -> tuple[type, ...]:
    """As type has it: a metaclass of the user's may give, or raise, what it likes."""
    return cast("tuple[type, ...]", vars(type)["__mro__"].__get__(kind))


def _namespace(kind: type) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", vars(type)["__dict__"].__get__(kind))


def _name(kind: type) -> tuple[Any, Any]:
    """Of its module, and its own there."""
    return vars(type)["__module__"].__get__(kind), vars(type)["__qualname__"].__get__(kind)


def _of(kind: type, owner: Owner) -> list[OwnSync]:
    """A class's own methods in place of an owner's, or a mixin's; those of another subclass are that one's."""
    found = []
    for method in filter(None, (owner.method, owner.setter)):
        base = next((base for base in _mro(kind) if method in _namespace(base)), owner.kind)
        above = (each for each in _mro(kind)[1:] if _is_below(each, owner.kind))
        if any(_is_below(each, base) for each in above):
            continue
        override = _namespace(base)[method]
        title, place = ".".join(map(str, (*_name(kind), method))), "no file"
        try:
            place = next((line_of(layer) for layer in layers(override)[::-1] if not is_ours(layer)), place)
            certain, why = _Reading(override, kind, owner, method).verdict()
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            certain, why = False, f"its code cannot be read: {type(error).__name__}: {error}"
        if certain:
            text = f"has a length sync of its own, which is not bounded: {why} waits without limit for a missing rank"
        else:
            text = f"replaces the bounded length sync, and whether it waits for other ranks is not known: {why}"
        if owner.kind is torch.nn.Module:
            advice = "inherit from NeMo's encoder instead, without this method"
        else:
            advice = f"call super().{method}(...) there instead, or delete it"
        if why and (certain or method == owner.method):
            found.append(OwnSync(title, certain, f"{title} ({place}) {text}; {advice}"))
    return found


class _Reading:
    """What an override's code says, with the helpers that it calls."""

    def __init__(self, override: Any, kind: type, owner: Owner, method: str) -> None:
        self._method, self._package = method, _package(override)
        self._collectives: list[str] = []
        self._unread: list[str] = []
        self._calls_base = self._limited = False
        self._read: list[FunctionType] = []
        nemos = [layers(vars(owner.kind).get(each))[-1] for each in (owner.method, owner.setter)]
        self._no_mystery = set[str]().union(*map(_attributes, _KNOWN), *(_names(each) for each in nemos if each))
        self._no_mystery -= _NOT_OF_TENSORS
        rest: list[tuple[Any, type | None]] = [(override, kind)]
        while rest and len(self._read) < _MOST_FUNCTIONS:
            rest += self._read_layers(*rest.pop())

    def verdict(self) -> tuple[bool, str]:
        """Whether it is certain that it waits, and for what; or why that is not known; or nothing to say."""
        collectives, unread = ", ".join(dict.fromkeys(self._collectives)), ", ".join(dict.fromkeys(self._unread))
        if self._collectives and not self._calls_base and not self._limited:
            return True, collectives
        if self._collectives:
            what = "calls the method of its base, too" if self._calls_base else "may have a limit in time"
            return False, f"it uses {collectives}, and {what}"
        return False, f"it uses {unread}, which cannot be looked into" if unread and not self._calls_base else ""

    def _read_layers(self, thing: Any, kind: type | None) -> list[tuple[Any, type | None]]:
        """Read a function and what it wraps; kind: of its `self`. Gives what is to be read next."""
        found = []
        for layer in layers(thing):
            function = function_of(layer)
            if function is None:
                self._unread.append(place_of(layer))
            elif is_ours(layer):
                self._calls_base |= function.__name__ == self._method
                break
            elif not any(function is other for other in self._read):
                self._read.append(function)
                found += self._read_function(function, kind)
        return found

    def _read_function(self, function: FunctionType, kind: type | None) -> list[tuple[Any, type | None]]:
        code, package, names = function.__code__, _package(function), _names(function)
        is_torchs = _module(function).startswith("torch.distributed")
        if is_torchs:
            names = {function.__name__, "distributed"}  # imported from there, under whatever name
        elif package in _LIBRARIES - {"nemo"}:
            return []
        closure = zip(code.co_freevars, map(_contents, function.__closure__ or ()), strict=True)
        known = {**function.__globals__, **dict(closure)}
        if "getattr" in names:
            texts = (*(known.get(name) for name in names), *code.co_consts)
            names |= {text for text in texts if isinstance(text, str)}
        distributed = "distributed" in names or any(known.get(name) is torch.distributed for name in names)
        collectives = sorted(names & (_COLLECTIVES | (_ALSO_OF_TENSORS if distributed else set())))
        place = "" if is_torchs or len(self._read) == 1 else f" in {place_of(function)}"
        self._collectives += [name + place for name in collectives]
        self._calls_base |= self._method in names
        self._limited |= not names.isdisjoint(_LIMITED)
        if package in _LIBRARIES or collectives:
            return []
        if kind is not None and code.co_argcount:
            known[code.co_varnames[0]] = kind  # self
        found = []
        for path, called in _paths(code):
            value, its_kind = _at(path, known)
            inherited = path[0] == "" and kind is not None and path[-1] in _attributes(kind)  # of super()
            if value is not _UNKNOWN:
                found += [(value, its_kind)] if function_of(value) is not None else _callable(value)
            elif called and package == self._package and not inherited and path[-1] not in self._no_mystery:
                self._unread.append(".".join(path).lstrip("."))
        return found


_UNKNOWN = object()


def _at(path: tuple[str, ...], known: dict[str, Any]) -> tuple[Any, type | None]:
    """What a dotted name stands for, and of which class it is a method; _UNKNOWN where only running it would tell."""
    value, kind = known.get(path[0], _UNKNOWN), None
    for name in path[1:]:
        if value is _UNKNOWN:
            break
        kind = None if isinstance(value, ModuleType) else value if isinstance(value, type) else type(value)
        value = _attributes(value).get(name, _UNKNOWN)
    return value, kind


def _callable(value: Any) -> list[tuple[Any, type | None]]:
    """The method that runs when an object of the user's is called."""
    kind = type(value)
    call = None if isinstance(value, ModuleType | type) or _package(value) in _LIBRARIES else _attributes(kind)
    return [(call["__call__"], kind)] if call and "__call__" in call else []


def _attributes(value: Any) -> dict[str, Any]:
    """Of a module, of a class, or of an object's class; read, so that nothing of the user's runs."""
    if isinstance(value, ModuleType):
        return vars(value)
    kind = value if isinstance(value, type) else type(value)
    return {name: each for base in _mro(kind)[::-1] for name, each in _namespace(base).items()}


def _module(value: Any) -> str:
    """The name of the module that a function, or an object's class, is from."""
    if (function := function_of(value)) is not None:
        return str(function.__globals__.get("__name__"))
    return str(type(value).__module__)


def _package(value: Any) -> str:
    return _module(value).partition(".")[0]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _UNKNOWN


def _codes(code: CodeType) -> list[CodeType]:
    """A function's, and those of the functions in it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return [code, *(each for one in inner for each in _codes(one))]


def _names(function: FunctionType) -> set[str]:
    """All names that it uses, but for its own variables."""
    return {name for code in _codes(function.__code__) for name in (*code.co_names, *code.co_freevars)}


def _paths(function: CodeType) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The dotted names in it, and whether each is called as a method. What a call gives has the name "".

    Python 3.10 does not tell so for calls with keywords.
    """
    for code in _codes(function):
        path: list[str] = []
        called = False
        for each in dis.get_instructions(code):
            if each.opname in ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"):
                continue
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path = [*(path or [""]), each.argval]
                called = each.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((each.arg or 0) & 1))
                continue
            if path:
                yield tuple(path), called
            path, called = [], False
            if each.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "STORE_FAST_LOAD")):
                path = [each.argval[-1] if isinstance(each.argval, tuple) else str(each.argval)]
