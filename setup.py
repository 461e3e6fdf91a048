"""What pyproject.toml cannot say: where setuptools builds, and how the README reads on a package
index.
"""

import re
import tempfile
from pathlib import Path

from setuptools import setup

# An index shows the README without the files beside it: a link to one becomes the file's name, and
# a picture goes.
readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)\n*", "", readme)
readme = re.sub(r"\[[^]]*\]\((?!https://|#)([^)]*)\)", r"`\1`", readme)

# A wheel takes every file of its build folder, and build/ may hold modules of an earlier build:
# each has a new folder.
with tempfile.TemporaryDirectory() as folder:
    setup(
        long_description=readme,
        long_description_content_type="text/markdown",
        options={"build": {"build_base": folder}},
    )
