"""What the server of tests/ranks.py imports, once for all ranks that are forked from it.

A rank's garbage collector leaves alone what it was forked with: going through all of NeMo takes
half a second each time, and copies its memory.
"""

import contextlib
import gc
import importlib
import os

gc.disable()
for name in ("nemo.collections.asr", "nemo_patches.patching.monkeypatch"):
    with contextlib.suppress(ImportError):  # a NeMo with its diff has no nemo_patches
        importlib.import_module(name)
gc.freeze()
gc.enable()

# Not for what ranks start: tests/ranks.py has put this folder on PYTHONPATH for this import alone.
path = os.environ.pop("PYTHONPATH").partition(os.pathsep)[2]
if path:
    os.environ["PYTHONPATH"] = path
