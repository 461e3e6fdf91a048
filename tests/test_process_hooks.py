"""What of ours runs at exit and in a forked child runs in one order, whatever was imported first."""

from __future__ import annotations

import ast
from pathlib import Path

import interpreters
import pytest

import nemo_patches

pytestmark = pytest.mark.one_nemo
PACKAGE = Path(nemo_patches.__file__).parent

ORDERS = """
import atexit, os, sys

registered, register = [], atexit.register

def noted(hook, *arguments, **keywords):
    registered.append(hook.__module__)
    return register(hook, *arguments, **keywords)

atexit.register = noted
from nemo_patches.channel import process_hooks
from nemo_patches.channel.process_hooks import AtExit, InForkedChild

# Hooks that are registered later run earlier: what ours need must still be there.
import logging, multiprocessing.util, torch.distributed
assert registered[-len(AtExit):] == [process_hooks.__name__] * len(AtExit), registered

def say(text):
    os.write(1, f"{text}\\n".encode())

def fail():
    say("fails")
    raise ValueError("an error of one step")

atexit.register(say, "theirs, from after our import")
process_hooks.at_last(lambda: say("at last"))
for place in [*reversed(AtExit), *reversed(InForkedChild)]:
    process_hooks.run(place, lambda place=place: say(place))
process_hooks.run(AtExit.STALL_MONITORS, fail)
process_hooks.run(InForkedChild.LENGTH_SYNC, fail)
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
say("forked")
"""


def test_the_orders_hold_and_one_error_keeps_no_other_from_running() -> None:
    ended = interpreters.python("-c", ORDERS, path=(PACKAGE.parent,))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "InForkedChild.EXCHANGES",
        "fails",
        "InForkedChild.STALL_MONITORS",
        "InForkedChild.STALL_SUBSCRIBER",
        "InForkedChild.TRACE",
        "forked",
        "theirs, from after our import",
        "fails",
        "AtExit.EXCHANGES",
        "at last",
    ]
    assert ended.stderr.count("an error of one step") == 2


OF_THE_SYSTEM = {
    "atexit.register": {"channel/process_hooks.py"},
    "multiprocessing.util.Finalize": {"channel/process_hooks.py"},
    "os.register_at_fork": {"channel/process_hooks.py"},
    "threading.Thread": set[str](),  # but by Daemon
}


def test_hooks_and_threads_are_ours_in_one_place_each() -> None:
    found = {name: set[str]() for name in OF_THE_SYSTEM}
    for path in PACKAGE.rglob("*.py"):
        inner = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and (name := ast.unparse(node.func)) in found
                and "tools/" not in inner
            ):
                found[name].add(inner)
    assert found == OF_THE_SYSTEM
