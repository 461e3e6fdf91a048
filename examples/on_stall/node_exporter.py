"""on_stall: metrics for Prometheus, in a file that node_exporter's textfile collector reads.

export STALL_TEXTFILES=/var/lib/node_exporter/textfiles     its --collector.textfile.directory
export NEMO_PATCHES_ON_STALL='python3 /path/to/nemo-patches/examples/on_stall/node_exporter.py'

The end of a stall is not told: let the alert end by the time, as in
time() - nemo_patches_stall_time_seconds < 900.
"""

import json
import os
import sys
from pathlib import Path


def label(value: object) -> str:
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{text}"'


report = json.load(sys.stdin)
lines = [
    "# HELP nemo_patches_stall Ranks that others wait for.",
    "# TYPE nemo_patches_stall gauge",
]
for one in report["missing"]:
    named = {name: one[name] for name in ("rank", "kind", "host")}
    labels = ",".join(f"{name}={label(value)}" for name, value in named.items())
    lines.append(f"nemo_patches_stall{{{labels}}} 1")
lines += [
    "# HELP nemo_patches_stall_time_seconds When the stall was reported.",
    "# TYPE nemo_patches_stall_time_seconds gauge",
    f"nemo_patches_stall_time_seconds {report['time']}",
]
file = Path(os.environ["STALL_TEXTFILES"], "nemo_patches.prom")
written = file.with_suffix(".tmp")  # the collector reads *.prom, which must be whole
written.write_text("\n".join(lines) + "\n", encoding="utf-8")
written.replace(file)
