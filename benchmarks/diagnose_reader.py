"""How long `diagnose` reads 8 ranks of a million records each, and how much memory it takes.

The traces are written once into a folder for temporary files. Prints seconds from the start of the
command to its end, and the peak of its memory: that of its largest process, and what all together
stay below.

    python benchmarks/diagnose_reader.py [--ranks 8] [--records 1000000]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulated_traces import Setup, header

from nemo_patches.tracing import records

_PER_CALL = 3  # records


def write(folder: Path, rank: int, size: int, count: int) -> None:
    """One rank's trace: all in step, the clocks an hour apart."""
    draw = random.Random(rank)
    first = header(rank, size, 1.7e9 + 3600 * rank, Setup())
    name = "ConformerEncoder"
    with (folder / f"rank-{rank:05}.20261121T183311.{4000 + rank}.jsonl").open(
        "wb"
    ) as file:
        file.write(records.encode(first))
        for n in range(1, count // _PER_CALL + 1):
            t, waited = n * 0.2, round(draw.random() * 0.01, 6)
            call: list[records.Record] = [
                records.Enter(
                    t, name, n, True, [8, 80, 1600], "float32", f"cuda:{rank % 8}"
                ),
                records.Sync(t + waited, name, n, records.CAME, n, waited, 1500, 1600),
                records.Leave(t + 0.1, name, n, [8, 512, 200]),
            ]
            file.write(b"".join(map(records.encode, call)))
        file.write(records.encode(records.End(t + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--records", type=int, default=1_000_000)
    arguments = parser.parse_args()
    folder = Path(
        tempfile.gettempdir(), f"nemo-patches-{arguments.ranks}-{arguments.records}"
    )
    if not folder.exists():
        print(f"writing {folder}, once", flush=True)
        making = Path(tempfile.mkdtemp(dir=folder.parent))
        for rank in range(arguments.ranks):
            write(making, rank, arguments.ranks, arguments.records)
        making.rename(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    began = time.monotonic()
    command = [sys.executable, "-m", "nemo_patches", "diagnose", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - began
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    processes = 1 + min(arguments.ranks, os.cpu_count() or 1)
    print(
        f"{arguments.ranks} ranks, {arguments.records} records each,"
        f" {size / (1 << 20):.0f} MiB, {os.cpu_count()} cores"
    )
    print(
        f"{seconds:.1f} s; peak: {largest:.0f} MiB the largest process, so under"
        f" {processes * largest:.0f} MiB all"
    )
    print(f"exit code {done.returncode}: {done.stdout.splitlines()[0]}")


if __name__ == "__main__":
    main()
