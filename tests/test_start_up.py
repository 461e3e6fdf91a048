"""Interpreters that start under auto-apply: what they load, what they chain, and that they always
start.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest
from interpreters import CHECKOUT, LAUNCHER, environment, python, run

pytestmark = pytest.mark.one_nemo

MODULES = "import sys; print(*sorted(sys.modules))"
HOOKS = (
    "import sys; print(sum('nemo_patches' in type(finder).__module__ for finder in"
    " sys.meta_path))"
)
STARTED_BY_EVERY_PROCESS = (
    "sitecustomize.py",
    "nemo_patches/__init__.py",
    "nemo_patches/patching/__init__.py",
    "nemo_patches/patching/start_up.py",
    "nemo_patches/patching/boot/sitecustomize.py",
)
both_ways_in = pytest.mark.parametrize(
    "ours",
    [
        pytest.param(CHECKOUT, id="checkout"),
        pytest.param(LAUNCHER, id="launcher", marks=pytest.mark.wheel),
    ],
)


@both_ways_in
def test_a_process_that_never_imports_nemo_has_three_modules_more(ours: Path) -> None:
    bare = set(python("-c", MODULES).stdout.split())
    started = python("-c", MODULES, path=(ours,))
    assert set(started.stdout.split()) - bare == {
        "nemo_patches",
        "nemo_patches.patching",
        "nemo_patches.patching.start_up",
    }
    assert started.stderr == ""
    assert bare <= set(started.stdout.split())


def test_what_every_process_runs_is_the_syntax_of_an_old_python() -> None:
    for name in STARTED_BY_EVERY_PROCESS:
        ast.parse((CHECKOUT / name).read_text(), feature_version=(3, 6))


@pytest.mark.wheel
def test_the_launchers_folder_holds_the_sitecustomize_and_nothing_else() -> None:
    assert [file.name for file in LAUNCHER.iterdir() if file.name != "__pycache__"] == [
        "sitecustomize.py"
    ]


# What a shadowed sitecustomize can see of itself and of its interpreter, and what is seen of it
# afterwards.
REPORT = """
import json, sys
print(json.dumps([
    __name__, __file__, __doc__, __package__, sorted(globals()), __spec__.name, __spec__.origin, str(type(__loader__)),
    sys.modules[__name__].__dict__ is globals(), sys.path, sys.argv,
]))
"""
AFTERWARDS = """
import sys
print("sitecustomize" in sys.modules, sys.path[1:], [name for name in sys.modules if "customize" in name])
try:
    import sitecustomize
    print(sitecustomize.__file__, sorted(vars(sitecustomize)))
except ImportError as error:
    print(repr(error), error.name)
"""
SHADOWED = {
    "none": {},
    "plain": {"sitecustomize.py": REPORT},
    "package": {"sitecustomize/__init__.py": REPORT, "sitecustomize/inner.py": ""},
    "folder": {"sitecustomize/readme.txt": ""},
    "sets a variable": {
        "sitecustomize.py": "import os; os.environ['VENDOR'] = '1'\n" + REPORT
    },
    "raises": {"sitecustomize.py": REPORT + "raise RuntimeError('a vendor')\n"},
    "raises ImportError": {
        "sitecustomize.py": REPORT + "import a_module_that_is_not_there\n"
    },
    "syntax error": {"sitecustomize.py": "x = = 1\n"},
    "exits": {"sitecustomize.py": REPORT + "raise SystemExit(7)\n"},
    "adds a site folder": {
        "sitecustomize.py": (
            "import os, site; site.addsitedir(os.path.join(os.path.dirname(__file__),"
            " 'more'))\n" + REPORT
        ),
        "more/more.pth": "import os; os.environ['FROM_PTH'] = '1'\n",
    },
    "replaces itself": {
        "sitecustomize.py": "import sys, json\nsys.modules[__name__] = json\n"
    },
    "changes sys.path": {
        "sitecustomize.py": "import sys\nsys.path[:] = sys.path[1:] + ['/nowhere']\n"
    },
}


@both_ways_in
@pytest.mark.parametrize("shadowed", SHADOWED)
def test_the_shadowed_sitecustomize_runs_as_if_ours_were_not_there(
    shadowed: str, ours: Path, tmp_path: Path
) -> None:
    vendor, nothing = tmp_path / "vendor", tmp_path / "nothing"
    nothing.mkdir()
    vendor.mkdir()
    for name, text in SHADOWED[shadowed].items():
        (vendor / name).parent.mkdir(exist_ok=True)
        (vendor / name).write_text(text)
    program = (
        AFTERWARDS
        + "import os; print(os.environ.get('VENDOR'), os.environ.get('FROM_PTH'))"
    )
    stock = python("-c", program, path=(nothing, vendor))
    with_ours = python("-c", program, path=(ours, vendor))
    assert with_ours.returncode == stock.returncode
    assert (
        with_ours.stdout.replace(f"'{ours}'", f"'{nothing}'").replace(
            f'"{ours}"', f'"{nothing}"'
        )
        == stock.stdout
    )
    assert without_frames(with_ours.stderr) == without_frames(stock.stderr)
    if SHADOWED[shadowed].get("sitecustomize.py", "").startswith(REPORT):
        assert json.loads(stock.stdout.splitlines()[0])[0] == "sitecustomize"
    if stock.returncode == 0:
        assert python("-c", HOOKS, path=(ours, vendor)).stdout.splitlines()[-1] == "1"


def without_frames(text: str) -> list[str]:
    """A traceback's own lines: one frame more or less is not what a person reads in it."""
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_where_ours_is_on_the_path_several_times_under_several_names_it_ends(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(CHECKOUT)
    path = (tmp_path / "link", LAUNCHER, CHECKOUT)
    # '' is the checkout again.
    program = "import sys; sys.path.insert(0, ''); " + HOOKS + AFTERWARDS
    done = run([sys.executable, "-c", program], environment(*path), cwd=CHECKOUT)
    assert done.stdout.splitlines()[0] == "1"
    assert done.stdout.splitlines()[-1].endswith("sitecustomize")
    assert done.stderr == ""


@both_ways_in
def test_where_the_current_folder_is_gone(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "sitecustomize.py").write_text("print('vendor')\n")
    program = (
        "import os, sys; os.rmdir(os.getcwd()); del sys.modules['sitecustomize'];"
        " import sitecustomize"
    )
    (tmp_path / "gone").mkdir()
    done = run(
        [sys.executable, "-c", program],
        environment(ours, tmp_path / "vendor"),
        cwd=tmp_path / "gone",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "vendor\nvendor\n", "")


@both_ways_in
def test_usercustomize_is_untouched(ours: Path, tmp_path: Path) -> None:
    python_name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    user_site = tmp_path / "lib" / python_name / "site-packages"
    user_site.mkdir(parents=True)
    (user_site / "usercustomize.py").write_text(REPORT)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    base = os.path.realpath(sys.executable)  # a virtual environment has no user site
    stock, with_ours = (
        python(
            "-c", "pass", path=(first,), executable=base, PYTHONUSERBASE=str(tmp_path)
        ).stdout
        for first in (nothing, ours)
    )
    assert json.loads(stock)[0] == "usercustomize"
    assert with_ours.replace(str(ours), str(nothing)) == stock


def test_two_copies_apply_once_and_what_they_shadow_runs_once(tmp_path: Path) -> None:
    other = tmp_path / "other checkout"
    other.mkdir()
    shutil.copy(CHECKOUT / "sitecustomize.py", other)
    shutil.copytree(CHECKOUT / "nemo_patches", other / "nemo_patches")
    (tmp_path / "sitecustomize.py").write_text("print('vendor')\n")
    program = HOOKS + "; import nemo_patches; print(nemo_patches.__file__)"
    done = python("-c", program, path=(LAUNCHER, other, CHECKOUT, CHECKOUT, tmp_path))
    assert done.stdout.splitlines() == [
        "vendor",
        "1",
        str(CHECKOUT / "nemo_patches" / "__init__.py"),
    ]
    assert done.stderr == ""
    done = python("-c", program, path=(other, LAUNCHER, tmp_path))
    assert done.stdout.splitlines() == [
        "vendor",
        "1",
        str(other / "nemo_patches" / "__init__.py"),
    ]


CHAINS_BY_ITSELF = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
place = sys.path.index(here)
del sys.path[place]
mine = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    print("nothing else")
    sys.modules["sitecustomize"] = mine
finally:
    sys.path.insert(place, here)
"""


@both_ways_in
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_tracer_that_chains_by_itself(
    ours: Path, ours_first: bool, tmp_path: Path
) -> None:
    tracer, vendor = tmp_path / "tracer", tmp_path / "vendor"
    for folder, text in ((tracer, CHAINS_BY_ITSELF), (vendor, "print('vendor')\n")):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
    path = (ours, tracer) if ours_first else (tracer, ours)
    assert python("-c", HOOKS, path=path).stdout.splitlines() == ["nothing else", "1"]
    assert python("-c", HOOKS, path=(*path, vendor)).stdout.splitlines() == [
        "vendor",
        "1",
    ]


@pytest.mark.skipif(
    not Path("/usr/lib/python3").exists(), reason="no Debian Python here"
)
def test_debians_own_sitecustomize() -> None:
    debian = Path("/usr/bin/python3")
    stock, with_ours = (
        python("-c", AFTERWARDS, path=path, executable=debian)
        for path in ((), (CHECKOUT,))
    )
    assert "sitecustomize.py" in stock.stdout
    assert with_ours.stdout.replace(f"'{CHECKOUT}', ", "") == stock.stdout
    assert python("-c", HOOKS, path=(CHECKOUT,), executable=debian).stdout == "1\n"


@both_ways_in
@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_where_python_reads_no_sitecustomize_or_no_pythonpath_there_is_nothing_of_ours(
    option: str, ours: Path
) -> None:
    done = python(
        option, "-c", HOOKS + MODULES.removeprefix("import sys"), path=(ours,)
    )
    hooks, modules = done.stdout.splitlines()
    assert hooks == "0"
    assert "nemo_patches" not in modules.split()
    assert done.stderr == ""


@pytest.mark.wheel
def test_a_virtual_environments_own_sitecustomize_is_the_shadowed_one(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    executable = tmp_path / "env" / "bin" / "python"
    place = python(
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        executable=executable,
    ).stdout.strip()
    Path(place, "sitecustomize.py").write_text("print('the environment')\n")
    done = python("-c", HOOKS, path=(LAUNCHER,), executable=executable)
    assert done.stdout.splitlines() == ["the environment", "1"]
    assert done.stderr == ""


FINDER = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {file!r}) if name == "sitecustomize" else None
sys.meta_path.append(Finder)
"""


@both_ways_in
def test_a_sitecustomize_that_another_finder_has_is_the_shadowed_one(
    ours: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=False)  # as an editable installation has one
    executable = tmp_path / "env" / "bin" / "python"
    place = python(
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        executable=executable,
    ).stdout.strip()
    hidden = tmp_path / "hidden.py"
    hidden.write_text("print('hidden', __name__, __file__)\n")
    Path(place, "finder.py").write_text(FINDER.format(file=str(hidden)))
    Path(place, "finder.pth").write_text("import finder\n")
    stock = python("-c", "pass", executable=executable)
    assert stock.stdout == f"hidden sitecustomize {hidden}\n"
    done = python("-c", HOOKS, path=(ours,), executable=executable)
    assert done.stdout.splitlines() == [stock.stdout.strip(), "1"]


@both_ways_in
def test_disabled_there_is_no_hook_and_the_shadowed_one_still_runs(
    ours: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('vendor')\n")
    done = python("-c", HOOKS, path=(ours, tmp_path), NEMO_PATCHES_DISABLE="1")
    assert done.stdout.splitlines() == ["vendor", "0"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("start_up.py", "missing"),
        ("start_up.py", "syntax error"),
        ("start_up.py", "raises"),
        ("boot/sitecustomize.py", "missing"),
        ("boot/sitecustomize.py", "syntax error"),
    ],
)
def test_a_damaged_copy_says_so_in_one_line_and_the_process_runs(
    file: str, damage: str, tmp_path: Path
) -> None:
    shutil.copy(CHECKOUT / "sitecustomize.py", tmp_path)
    shutil.copytree(CHECKOUT / "nemo_patches", tmp_path / "nemo_patches")
    damaged = tmp_path / "nemo_patches" / "patching" / file
    if damage == "missing":
        damaged.unlink()
    else:
        damaged.write_text(
            "x = = 1" if damage == "syntax error" else "raise OSError('disk')"
        )
    done = python("-c", "print('runs')", path=(tmp_path,))
    assert (done.returncode, done.stdout) == (0, "runs\n")
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "sitecustomize.py") in line
    assert "NeMo runs as stock" in line
    for unsayable in ("2>&-", "2>/dev/full"):
        command = ["sh", "-c", f'"$0" -c "print(1)" {unsayable}', sys.executable]
        assert run(command, environment(tmp_path)).stdout == "1\n"


def test_a_checkout_runs_the_launchers_text() -> None:
    words = "from nemo_patches.patching import start_up"
    assert words in (LAUNCHER / "sitecustomize.py").read_text()
    assert words not in (CHECKOUT / "sitecustomize.py").read_text()


def test_spawned_and_forked_children_have_the_hook_too(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, sys\ndef count():\n    print(sum('nemo_patches' in"
        " type(finder).__module__ for finder in sys.meta_path), flush=True)\nif"
        " __name__ == '__main__':\n    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        child = multiprocessing.get_context(method).Process(target=count)\n   "
        "     child.start()\n        child.join(20)\n"
    )
    script = tmp_path / "main.py"
    script.write_text(program)
    done = python(str(script), path=(CHECKOUT,))
    assert done.stdout.split() == ["1", "1", "1"], done.stderr
