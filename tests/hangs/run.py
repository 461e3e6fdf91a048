"""`python tests/hangs/run.py NAME`: one reported hang on two CPU ranks, as stock and with
nemo_patches.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The checkout's, for the ranks, too.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]


def main(names: list[str]) -> int:
    """The exit code: 0 if it comes out as docs/hangs.md says, else 1."""
    import runs
    from gallery import HANGS_BY_NAME
    from scenario import STALL_TIMEOUT_S

    if len(names) != 1 or names[0] not in HANGS_BY_NAME:
        print(
            f"run.py: {' '.join(names) or 'nothing'} is not allowed; allowed: one of"
            f" {', '.join(HANGS_BY_NAME)}"
        )
        return 2
    hang = HANGS_BY_NAME[names[0]]
    settings = {"stall_timeout": f"{STALL_TIMEOUT_S:g}", **hang.settings}
    print(f"{hang.name}: {hang.job}")
    print(f"Reported as: {', '.join(hang.reports)}")
    print(
        "With nemo_patches:",
        *(f"NEMO_PATCHES_{name.upper()}={value}" for name, value in settings.items()),
    )
    with tempfile.TemporaryDirectory(prefix="nemo-patches-hang-") as folder:
        results = []
        for result in runs.run([(hang, False), (hang, True)], Path(folder), at_once=2):
            print(result, flush=True)
            results.append(result)
    return int(not all(result.as_expected for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
