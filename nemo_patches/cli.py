"""The `nemo-patches` command.

It must start fast, so torch and NeMo are imported nowhere at module level.
"""
# No `from __future__ import annotations`: typer reads them, and Pythons differ in what they make of
# one that is a text.

import gc
import inspect
import io
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import nemo_patches as package
from nemo_patches.sync.settings import ALL_SETTINGS, Setting, SettingsError
from nemo_patches.tools.console import terminal
from nemo_patches.tools.doctor.request import Request
from nemo_patches.tools.options import choice, switch, with_value
from nemo_patches.tools.refusals import refusals

# Errors are one line on stderr, so typer's boxes and its rich tracebacks are off.
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# ClickException: click's, or that of the copy that newer typers have.
_UsageError: Any = typer.BadParameter.__mro__[2]
_Json = Annotated[bool, switch("--json", "For programs.")]


def _number(
    kind: type[int] | type[float], low: float, high: float
) -> Callable[[Any], Any]:
    """A parser whose error says what is allowed."""

    def parse(text: Any) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            allowed = "a whole number, " if kind is int else ""
            allowed += f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            raise typer.BadParameter(f"{text} is not allowed; allowed: {allowed}")
        return value

    return parse


def _options(
    parameters: Iterable[Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """In place of the command's `**given`, these parameters."""

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined]
        return function

    return declared


def _refused(command: str, error: Exception, code: int = 2) -> typer.Exit:
    """Say in one line what the command refuses, and return its end."""
    typer.echo(f"nemo-patches {command}: {error}", err=True)
    return typer.Exit(code)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nemo-patches {package.__version__}")
        raise typer.Exit


@app.callback(epilog="Job hangs? nemo-patches diagnose")
def nemo_patches(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find which rank a hung training job waits for; keep NeMo's length sync from hanging it."""


@app.command()
def demo(
    manifest: Annotated[
        Path | None,
        with_value(
            metavar="FILE",
            help_="Your own NeMo manifest.",
            show_default="synthetic audio",
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", parser=_number(int, 2, 8), help="CPU ranks, 2 to 8."
        ),
    ] = 2,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            parser=_number(float, 3, 120),
            help="How long one rank stalls, 3 to 120.",
        ),
    ] = 6.0,
    record: Annotated[
        Path | None,
        with_value(metavar="FILE.svg", help_="Also draw the output into this file."),
    ] = None,
) -> None:
    """Reproduce the hang on this machine's CPU, then fix it.

    Trains on stock NeMo, then the same with the fix, and compares both.
    """
    from nemo_patches.tools.demo import command
    from nemo_patches.tools.demo.jobs import DemoError

    try:
        raise typer.Exit(command.run(manifest, devices, seconds, record))
    except DemoError as error:
        raise _refused("demo", error) from None
    except KeyboardInterrupt:
        typer.echo("nemo-patches demo: interrupted; every rank was ended", err=True)
        raise typer.Exit(130) from None


def _setting_option(setting: Setting) -> Parameter:
    """--stall-timeout for stall_timeout."""
    default = setting.text(setting.default) + setting.unit
    if setting.words:
        option = choice(
            setting.words, setting.several, help=setting.help, show_default=default
        )
    else:
        option = with_value(metavar="VALUE", help_=setting.help, show_default=default)
    annotation = Annotated[str | None, option]
    return Parameter(
        setting.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


@app.command(context_settings={"allow_interspersed_args": False})
@_options(map(_setting_option, ALL_SETTINGS))
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", hidden=True)],
    **given: Any,
) -> None:
    """Run a training command with the fix in all its processes.

    COMMAND stands after `--`, with its arguments: nemo-patches run -- torchrun train.py
    """
    from nemo_patches.patching import DISABLE_VARIABLE, admission
    from nemo_patches.tools import launch

    try:
        for refusal in refusals(given):
            raise refusal
        if admission.is_disabled():
            typer.echo(
                f"nemo-patches run: {DISABLE_VARIABLE}=1: nothing will be patched",
                err=True,
            )
        for sentence in admission.misspelt():
            typer.echo(f"nemo-patches run: {sentence}", err=True)
        options = {setting.variable: given[setting.name] for setting in ALL_SETTINGS}
        chosen = {
            variable: value for variable, value in options.items() if value is not None
        }
        launch.become(command, launch.with_auto_apply({**os.environ, **chosen}))
    except SettingsError as error:
        raise _refused("run", error) from None
    except OSError as error:
        line, code = launch.cannot_start(command, error)
        typer.echo(line, err=True)
        raise typer.Exit(code) from None


@app.command()
def status(json: _Json = False) -> None:
    """Say whether NeMo is patched here, and why not.

    Then the classes that are patched, the settings that are changed, and the versions.

    Exit codes: 0 on; 1 off, not possible, or a misspelt variable, so that a setting has no effect;
    2 unknown.
    """
    from nemo_patches.tools import status as status_command

    try:
        report = status_command.examine()
    except status_command.NotInstalled as error:
        answer = f"cannot be patched: {error}"
        told = {"state": status_command.CANNOT_BE, "answer": answer}
        typer.echo(status_command.as_json(told) if json else answer)
        raise typer.Exit(1) from None
    except status_command.StatusError as error:
        if json:
            typer.echo(status_command.as_json({"error": str(error)}))
        typer.echo(f"nemo-patches status: it cannot be told: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(status_command.as_json(asdict(report)))
    else:
        status_command.show(report, terminal(80))  # see doctor/command.py
    raise typer.Exit(
        0
        if report.state == status_command.ON and not (report.reasons or report.misspelt)
        else 1
    )


@app.command()
def diff(
    nemo: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="A NeMo checkout, or the site-packages folder with NeMo.",
        ),
    ],
    check: Annotated[
        bool, switch("--check", "Say whether one of patches/ applies instead.")
    ] = False,
) -> None:
    """Print the fix as a diff against your copy of NeMo.

    `git apply` and `patch -p1` take it.

    Exit codes: 0 printed, or one of patches/ applies; 1 none of patches/ applies; 2 refused.
    """
    from nemo_patches.vendoring import checkouts, diffs
    from nemo_patches.vendoring.errors import DiffError

    try:
        checkout = checkouts.read(nemo)
        text = b"" if check else diffs.text(checkout)
        applies, answer = diffs.check(checkout) if check else (True, "")
        notes = diffs.notes(checkout)
    except DiffError as error:
        raise _refused("diff", error) from None
    for note in notes:
        typer.echo(f"nemo-patches diff: {nemo}: {note}", err=True)
    if not applies:
        raise _refused("diff", DiffError(answer), 1)
    # Bytes: a checkout's carriage returns are part of the diff.
    typer.echo(answer if check else text, nl=check)


@app.command()
@_options(inspect.signature(Request).parameters.values())
def doctor(**given: Any) -> None:
    """Find what in a training config can hang or stop a job.

    CONFIG is a YAML file, or a Python file of training code. KEY=VALUE are Hydra's overrides,
    for all of them. Nothing is executed.

    Without a config: check this machine's variables of NCCL and torch. With --ranks: compare the
    ranks of a job.

    Exit codes: 0 nothing, or notes only; 1 findings; 2 something cannot be read or done.
    """
    from nemo_patches.tools.doctor import command

    # Objects; looking for garbage in a large config's trees took 0.4 s of 3 s.
    gc.set_threshold(50_000)
    raise typer.Exit(command.carry_out(Request(**given)))


@app.command()
def diagnose(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", hidden=True)
    ] = None,
    json: _Json = False,
    html: Annotated[
        Path | None,
        with_value(
            metavar="FILE",
            help_="Write a page too: all ranks in time, their stacks, what is cited.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        with_value(
            metavar="JOB",
            help_="A running job, by its name or the folder in which it runs.",
        ),
    ] = None,
    pids: Annotated[
        str,
        with_value(
            metavar="P,P",
            help_=(
                "The ranks' processes on this host, in the order of the ranks, if they"
                " are not found by themselves."
            ),
            show_default="found",
        ),
    ] = "",
) -> None:
    """Say which rank a job waits for, where it is and why.

    Without PATH: the jobs that run on this host. PATH is a file or folder with what you have:
    stacks of hosts, logs, traces, stall reports, Flight Recorder dumps; - is standard input.

    Exit codes: 0 nothing found; 1 a finding; 2 unknown.
    """
    from nemo_patches.tools.diagnose import command

    try:
        raise typer.Exit(
            command.run(paths or [], json=json, html=html, job=job, pids=pids)
        )
    except command.DiagnoseError as error:
        refused = _refused("diagnose", error)
        if json:
            typer.echo(command.error_as_json(error))
        raise refused from None


@app.command()
def stacks(
    json: Annotated[
        bool, switch("--json", "For `nemo-patches diagnose`, here or elsewhere.")
    ] = False,
    pids: Annotated[
        str,
        with_value(
            metavar="PID,PID",
            help_="Only these processes, in the order of the ranks.",
            show_default="found by their launcher",
        ),
    ] = "",
    job: Annotated[
        Path | None,
        with_value(
            metavar="JOB",
            help_="Only ranks of the job of this name, or that work in this folder.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """Collect where the ranks on this host are, for diagnose.

    Of any job, by /proc and py-spy, which stops each rank for some 0.1 s. With several hosts: on
    each, `nemo-patches stacks --json > $(hostname).json`; then `nemo-patches diagnose` these files.

    Exit codes: 0 collected; 2 there is nothing to collect.
    """
    from nemo_patches.tools.diagnose import stacks_command
    from nemo_patches.tools.diagnose.collect.host_jobs import NothingToLookAtError

    try:
        raise typer.Exit(stacks_command.run(json, pids, job))
    except NothingToLookAtError as error:
        raise _refused("stacks", error) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


# Options of earlier versions, and what is there in their place
_GONE = {"--plot": "--html=FILE writes a page with all ranks in time"}


def _text_of(error: Any) -> str:
    """One line about what was typed wrong; or the help, if there were no arguments at all."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "nemo-patches"
    text = re.sub(r"^Invalid value for '(-[^']*)': ", r"\1=", error.format_message())
    if "\n" in text:
        return text
    hint = "" if "allowed: " in text else f"; see {where} --help"
    if instead := _GONE.get(getattr(error, "option_name", "")):
        hint = f" any more; {instead}"
    return f"{where}: {text.rstrip('.')}{hint}"


def _code_of_app() -> Any:
    """The exit code of the command. Raises BrokenPipeError, of which click makes an exit code that
    means a finding.
    """
    try:
        return app(standalone_mode=False)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise


def _leave_closed_pipe() -> NoReturn:
    """Whoever read the output (`head`) has gone: end as other programs do, with the exit code of
    SIGPIPE.
    """
    # Else Python tries again at exit to write the rest.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(128 + signal.SIGPIPE)


def main() -> None:
    """Run the command. What was typed wrong, or cannot be loaded, is one line; the exit code is
    2.
    """
    if sys.stdout is None:  # it is closed, and not all code that prints can do without
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # The terminal's encoding may lack a character.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _code_of_app()
        sys.stdout.flush()
        sys.exit(code)
    except _UsageError as error:
        typer.echo(_text_of(error), err=True)
    except typer.Abort:
        typer.echo("nemo-patches: aborted", err=True)
    except ModuleNotFoundError:  # __main__ says it
        raise
    except (
        ImportError
    ) as error:  # what is installed cannot be loaded: this machine lacks a library
        typer.echo(f"nemo-patches: {error}", err=True)
    except BrokenPipeError:
        _leave_closed_pipe()
    # Above all a full disk: with Python's own exit code, 1, it would look like a finding.
    except OSError as error:
        where = "" if error.filename else "standard output: "
        typer.echo(f"nemo-patches: {where}{error}", err=True)
        # Else Python tries again at exit to write the rest, and prints another error
        sys.stdout = None
    sys.exit(2)
