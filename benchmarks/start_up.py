"""Measures what auto-apply costs a Python process at its start, beside other tools' start-up hooks,
in one run.

`make benchmark-start-up` makes an environment with those tools and runs this; each line's
interpreter is the same one, and the rounds of all lines alternate, so that whatever else the
machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
QUIET = {
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}
GOAL = 5.0  # milliseconds over a bare start


@dataclass
class Line:
    """One row: an environment, and what a start takes in it."""

    name: str
    environment: dict[str, str]
    milliseconds: list[float] = field(default_factory=list)
    modules: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tools",
        type=Path,
        required=True,
        help="an environment with ddtrace, opentelemetry and wrapt",
    )
    parser.add_argument(
        "--torch", type=Path, required=True, help="an environment with torch"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text("import wrapt\n")
        tools = arguments.tools / "bin"
        print(
            f"{os.cpu_count()} cores. Milliseconds from start to end of a process,"
            " median (quartiles).\n"
        )
        measure("pass", tools / "python", lines(tools, Path(folder)), rounds=40)
        torch = arguments.torch / "bin"
        measure("import torch", torch / "python", lines(torch, None), rounds=12)


def lines(binaries: Path, wrapt: Path | None) -> list[Line]:
    """Bare twice, which shows the noise; ours both ways; and the others where they are asked
    for.
    """
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "NEMO_PATCHES_"))
    }
    found = [
        Line("bare", bare),
        Line("bare again", bare),
        Line("PYTHONPATH=/path/to/nemo-patches", {**bare, "PYTHONPATH": str(CHECKOUT)}),
        Line(
            "nemo-patches run",
            {
                **bare,
                "PYTHONPATH": str(CHECKOUT / "nemo_patches" / "patching" / "boot"),
            },
        ),
    ]
    if wrapt is not None:
        found.append(
            Line("a hook that imports wrapt", {**bare, "PYTHONPATH": str(wrapt)})
        )
        for tool in ("opentelemetry-instrument", "ddtrace-run"):
            path = f"{binaries}{os.pathsep}{bare['PATH']}"
            command = [
                str(binaries / tool),
                str(binaries / "python"),
                "-c",
                SHOW_ENVIRONMENT,
            ]
            done = subprocess.run(
                command,
                env={**bare, **QUIET, "PATH": path},
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
            found.append(Line(tool, json.loads(done.stdout.splitlines()[-1])))
    return found


def measure(program: str, python: Path, found: list[Line], rounds: int) -> None:
    for line in found:  # the first start writes bytecode
        line.modules = int(
            run(
                python, f"{program}\nimport sys; print(len(sys.modules))", line
            ).splitlines()[-1]
        )
    chance = random.Random(0)
    for _ in range(rounds):
        # What ran just before leaves the caches as it likes.
        for line in chance.sample(found, len(found)):
            began = time.perf_counter()
            run(python, program, line)
            line.milliseconds.append((time.perf_counter() - began) * 1000)
    bare = found[0]
    print(f"| `python -c {program!r}` | ms | over bare, ms | of bare | modules more |")
    print("|---|---|---|---|---|")
    for line in found:
        low, middle, high = statistics.quantiles(line.milliseconds, n=4)
        # Pairs of one round: what the machine does meanwhile meets both.
        pairs = list(zip(line.milliseconds, bare.milliseconds, strict=True))
        over = statistics.median(ours - stock for ours, stock in pairs)
        ratio = statistics.median(ours / stock for ours, stock in pairs)
        more = line.modules - bare.modules
        print(
            f"| {line.name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {over:.1f} |"
            f" {ratio:.2f} | {more} |"
        )
    print(
        (
            f"\nGoal for ours: at most {GOAL:g} ms over bare, and 3 modules.\n"
            if program == "pass"
            else ""
        ),
        flush=True,
    )


def run(python: Path, program: str, line: Line) -> str:
    done = subprocess.run(
        [str(python), "-c", program],
        env=line.environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


if __name__ == "__main__":
    main()
