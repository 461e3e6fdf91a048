"""Auto-apply in whole jobs: torchrun, Lightning's own launcher, data-loader workers; NeMo as stock
where it must be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nemo.package_info
import pytest
import torch
import traces
from interpreters import CHECKOUT, LAUNCHER, environment, python, run
from nest_training import STALL, STEPS, overrides
from ranks import REPORT_S

from nemo_patches.tools.demo import data

SCRIPT = Path(__file__).with_name("nest_training.py")
LIMIT = 600.0
TIMEOUT = 5  # seconds, in which the ranks connect on a busy machine too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nest")
    data.write_shards(data.make_audio(folder), 2, folder, uneven=False)
    return folder


def lines(done: subprocess.CompletedProcess[str], *words: str) -> list[str]:
    own = [line for line in done.stderr.splitlines() if "nemo_patches " in line]
    return [line for line in own if all(word in line for word in words)]


def trained_over_the_stall(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-4000:]
    ends = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith('{"rank"')
    ]
    assert sorted(end["rank"] for end in ends) == [0, 1]
    assert all((end["size"], end["steps"]) == (2, STEPS) for end in ends)
    assert (
        len(
            lines(
                done,
                "patched on all 2 ranks: ConformerEncoder, ",
                f"timeout={TIMEOUT} s",
                "INFO [rank 0/2",
            )
        )
        == 1
    )
    assert lines(done, "patched", "[rank 1/2") == []
    late, *_ = lines(
        done, "WARNING", "not every rank's length came within", "[rank 0/2"
    )
    # On a busy machine the ranks may not be connected in time for the first call: then that begins
    # the incident.
    assert "training call 2: " in late or "training call 1: " in late
    assert (
        TIMEOUT
        <= float(late.split("came within ")[1].split(" s")[0])
        <= TIMEOUT + REPORT_S
    )
    # A busy machine may have shorter stalls after it.
    recovered, *_ = lines(done, "recovered", "[rank 0/2")
    assert (
        TIMEOUT <= float(recovered.split("came ")[1].split(" s late")[0]) <= STALL + 30
    )
    assert lines(done, "ERROR") == []


@pytest.mark.alone
@pytest.mark.one_nemo
def test_torchrun(folder: Path, tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = run(
        [*torchrun, SCRIPT, *overrides(folder)],
        environment(
            CHECKOUT,
            NEMO_PATCHES_TIMEOUT=str(TIMEOUT),
            NEMO_PATCHES_TRACE=str(tmp_path),
        ),
        LIMIT,
    )
    trained_over_the_stall(done)
    assert (
        len(lines(done, "INFO", "patched on all 2 ranks", f", trace={tmp_path})")) == 1
    )
    found = [traces.records(file) for file in traces.files(tmp_path)]
    # And none of a data loader's worker.
    assert [trace[0]["rank"] for trace in found] == [0, 1]
    for trace in found:
        leaves = traces.of_kind(trace, "leave", e="ConformerEncoder")
        assert [leave["n"] for leave in leaves] == list(range(1, STEPS + 1))
        assert trace[-1]["k"] == "end"


@pytest.mark.alone
@pytest.mark.one_nemo
@pytest.mark.weekly  # without NeMo: tests/test_watch_begins.py, and `run`: tests/test_launch.py
def test_lightnings_own_launcher_under_nemo_patches_run_with_a_checkout_on_the_path_too(
    folder: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "nemo_patches",
        "run",
        "--timeout",
        str(TIMEOUT),
        "--",
        sys.executable,
        SCRIPT,
    ]
    command += overrides(folder)
    trained_over_the_stall(run(command, environment(CHECKOUT), LIMIT))


LOADERS = """
import torch


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        from nemo.collections.asr.modules import ConformerEncoder

        return hasattr(ConformerEncoder.update_max_seq_length, "__wrapped__")


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Items(), num_workers=1, multiprocessing_context="spawn")
    print([bool(item) for item in loader])
"""


@pytest.mark.one_nemo
def test_a_spawned_loader_worker_is_patched_without_a_line(tmp_path: Path) -> None:
    """Of a forked one: tests/test_start_up.py."""
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    done = run([sys.executable, script], environment(LAUNCHER), LIMIT)
    assert done.stdout.splitlines() == ["[True]"], done.stderr
    assert lines(done) == []


PROGRAM = """
from nemo.collections.asr.modules import ConformerEncoder


class Mine(ConformerEncoder):
    def update_max_seq_length(self, seq_length, device):
        self.set_max_audio_length(seq_length)


import nemo_patches
print(hasattr(ConformerEncoder.update_max_seq_length, "__wrapped__"))
print(str(nemo_patches.status()).splitlines()[0])
"""


@pytest.mark.matrix
def test_an_interpreter_that_imports_nemo_patches_it_and_names_what_overrides(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = run([sys.executable, script], environment(CHECKOUT), LIMIT)
    assert done.returncode == 0, done.stderr
    patched, first = done.stdout.splitlines()[-2:]
    assert patched == "True"
    assert first.startswith("on: ")
    assert first.endswith(
        " methods patched; overridden by __main__.Mine.update_max_seq_length"
    )
    line, overridden = lines(done)
    assert (
        f"(nemo {nemo.package_info.__shortversion__}, torch {torch.__version__}; sync=bounded"
        in line
    )
    assert "nemo_patches WARNING " in overridden
    assert f"__main__.Mine.update_max_seq_length ({script}:6) overrides" in overridden


def test_a_process_that_never_imports_nemo_says_nothing_of_a_bad_variable() -> None:
    done = python(
        "-c",
        "import json; print('runs')",
        path=(CHECKOUT,),
        NEMO_PATCHES_TIMEOUT="soon",
    )
    assert (done.stdout, done.stderr) == ("runs\n", "")
