"""Classes that override the bounded length sync, and may not call it. Each is named once.

From a look at the classes' attributes: nothing of the user's runs, and no code is read. That is for
`nemo-patches doctor`.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from .places import is_ours, line_of
from .rank_log import raised_by_signal_handler, report_of_rank

# A class that is made anew, by a reload or a decorator, is the same one.
_said: set[str] = set()


def overrides(owner: type, method: str) -> dict[str, str]:
    """A sentence for each override in the subclasses of `owner`, by the override's name."""
    found: dict[str, str] = {}
    rest = [owner]
    while rest:
        kind = rest.pop()
        found |= _override(kind, owner, method)
        rest += type.__subclasses__(kind)
    return found


def say(sentences: Iterable[str]) -> None:
    """Log each once."""
    for sentence in sentences:
        if sentence not in _said:
            _said.add(sentence)
            report_of_rank(sentence, logging.WARNING)


def subclass_check(
    owner: Any, method: str, in_force: Callable[[], bool]
) -> classmethod[Any, Any, None]:
    """The `__init_subclass__` of an owner: looks at each subclass, after what there was before."""
    before = vars(owner).get("__init_subclass__")

    def __init_subclass__(cls: type, /, **keywords: Any) -> None:
        if before is None:
            super(owner, cls).__init_subclass__(**keywords)
        else:
            before.__get__(None, cls)(**keywords)
        try:
            if in_force():
                say(_override(cls, owner, method).values())
        except Exception as error:  # nothing of ours may break a class statement
            if raised_by_signal_handler(error):
                raise

    return classmethod(__init_subclass__)


def _override(kind: type, owner: type, method: str) -> dict[str, str]:
    """The method that a class has in place of the owner's, which may be a mixin's."""
    base, found = next(_definitions(kind, method))
    is_function = type(found) is FunctionType
    if base is owner or (is_function and is_ours(found)):
        return {}
    module, name = (
        vars(type)[part].__get__(base) for part in ("__module__", "__qualname__")
    )
    title = f"{module}.{name}.{method}"
    place = f" ({line_of(found)})" if is_function else ""
    text = f"overrides {owner.__name__}'s: not bounded, unless it calls super().{method}(...)"
    return {title: f"{title}{place} {text}"}


def _definitions(kind: type, name: str) -> Iterator[tuple[type, Any]]:
    """The classes that define this attribute, and what it is. As type has them: a metaclass of the
    user's may do, and raise, what it likes."""
    for base in vars(type)["__mro__"].__get__(kind):
        namespace = vars(type)["__dict__"].__get__(base)
        if name in namespace:
            yield base, namespace[name]
