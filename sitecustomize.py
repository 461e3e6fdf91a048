"""Python runs this at start-up where PYTHONPATH names this folder: it runs the one of
`nemo-patches run`, as its own.
"""

import os
import sys

_checkout = os.path.dirname(os.path.abspath(__file__))
_path = os.path.join(_checkout, "nemo_patches", "patching", "boot", "sitecustomize.py")
try:
    with open(_path) as _file:
        _code = compile(_file.read(), _path, "exec")
except Exception as error:  # an incomplete copy
    _code = compile("", _path, "exec")
    try:  # noqa: SIM105  # as there
        sys.stderr.write(
            f"nemo_patches ERROR {__file__}: {error}; NeMo runs as stock\n"
        )
    except Exception:
        pass
exec(_code)
