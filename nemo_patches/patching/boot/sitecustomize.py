"""Python runs this at start-up under `nemo-patches run`, and a checkout's sitecustomize.py runs it:
NeMo is patched when a process imports it.
"""

import os
import sys

_package_is_in = os.path.dirname(
    os.path.abspath(__file__)
)  # of the one that Python runs
if not os.path.isdir(os.path.join(_package_is_in, "nemo_patches")):
    _package_is_in = os.path.abspath(os.path.join(_package_is_in, "..", "..", ".."))
# The copy of nemo_patches that this file belongs to, and no other.
sys.path.insert(0, _package_is_in)
try:
    from nemo_patches.patching import start_up
except Exception as error:  # an incomplete copy, or a Python that is too old for it
    sys.path.remove(_package_is_in)
    try:  # noqa: SIM105  # contextlib would be an import
        sys.stderr.write(
            f"nemo_patches ERROR {__file__}: {type(error).__name__}: {error}; NeMo runs"
            " as stock\n"
        )
    except Exception:
        pass  # closed, or a full disk: Python could not say what we raise either, and would end
else:
    sys.path.remove(_package_is_in)
    start_up.start(__file__)
