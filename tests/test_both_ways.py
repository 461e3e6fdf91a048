"""apply() and a diff are the same edit: the same program, beside stock NeMo and on a copy with its diff, to the bit.

Compared is what happens and not text: for every target class that this NeMo has, what each of two ranks computed, holds
and counted in both_ways.py's scenarios, and what it said. The copy is of the NeMo under test, so `make test-matrix`
compares on every series; nemo_patches is not importable beside it.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from both_ways import PATIENT, SIZE, Record
from encoders import POSITIONS
from interpreters import environment, run

from nemo_patches import __version__
from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import checkouts, parts

TESTS = Path(__file__).parent
LIMIT = 480  # seconds, for what takes 20 to 30 on an idle machine
NAMES = {
    "ConformerEncoder": "conformer",
    "SqueezeformerEncoder": "squeezeformer",
    "TransformerEncoder": "transformer",
    "ConvASREncoder": "conv_asr",
    "PunctuationCapitalizationLexicalAudioModel": "punctuation",
}
KINDS = {name: kind for kind, name in NAMES.items()}
Life = list[Record]  # of each rank

# In `make test` on one NeMo, for the sake of its time; `make test-matrix` has every series.
pytestmark = [pytest.mark.matrix, pytest.mark.one_nemo, pytest.mark.timeout(2 * LIMIT + 60)]


@pytest.fixture(scope="module")
def installed() -> Path:
    spec = importlib.util.find_spec("nemo")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def patched(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """The ranks' lives beside stock NeMo, with apply()."""
    return live(tmp_path_factory.mktemp("apply"), environment())


@pytest.fixture(scope="module")
def vendored_nemo(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of this NeMo with its diff."""
    folder = tmp_path_factory.mktemp("vendored")
    shutil.copytree(installed, folder / "nemo")
    for edit in checkouts.read(folder).edits():
        (folder / edit.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / edit.path).write_bytes(edit.after)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def vendored(vendored_nemo: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """The ranks' lives on the copy, with nothing of nemo_patches but the diff."""
    return live(tmp_path_factory.mktemp("diff"), environment(TESTS / "vendored", vendored_nemo))


def live(folder: Path, variables: dict[str, str]) -> Life:
    done = run(
        [sys.executable, TESTS / "both_ways.py", str(folder / "records")],
        {**variables, "NEMO_PATCHES_TIMEOUT": f"{PATIENT:g}"},
        LIMIT,
        TESTS,  # in the checkout's root, Python would find nemo_patches
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [Record(**fields) for fields in pickle.loads((folder / "records").read_bytes())]


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two records differ; a float or a tensor must be the same to the bit, NaN where NaN."""
    if type(one) is not type(other):
        return [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: {sorted(set(one) ^ set(other)) or 'another order'}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} elements"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{path}/{i}")]
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan())
        same = alike and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [f"{path}: tensors {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
    same = one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
    return [] if same else [f"{path}: {one!r} and {other!r}"]


def test_each_life_was_lived_in_its_own_world(
    installed: Path, vendored_nemo: Path, patched: Life, vendored: Life
) -> None:
    present = {NAMES[target.owner] for target in TARGETS if target.source_file() is not None}
    for record in (*patched, *vendored):
        assert set(record.world) == present
    sync = Path(parts.__file__).parents[1] / "sync"
    for here, there in zip(patched, vendored, strict=True):
        for name in present:
            one, other = here.world[name], there.world[name]
            assert Path(one["file"]).is_relative_to(installed)
            assert Path(other["file"]).is_relative_to(vendored_nemo)
            assert (one["sync"], other["sync"]) == (sync, vendored_nemo / parts.FOLDER / "sync")
            assert (one["built in"], other["built in"]) == ("", __version__)
            assert (one["can apply"], other["can apply"]) == (True, False)
            assert "all_reduce" in one["source"] and "all_reduce" not in other["source"]


def test_what_happens_is_the_same_to_the_bit(patched: Life, vendored: Life) -> None:
    for rank in range(SIZE):
        assert differences(patched[rank].scenarios, vendored[rank].scenarios) == []


def test_what_they_say_is_the_same_but_for_what_apply_says_of_itself(patched: Life, vendored: Life) -> None:
    for here, there in zip(patched, vendored, strict=True):
        of_apply = [
            line for line in here.lines if words(line).startswith(("patched ", "patched: ", "settings changed: "))
        ]
        assert of_apply
        assert by_encoder([line for line in here.lines if line not in of_apply]) == by_encoder(there.lines)


def by_encoder(lines: list[str]) -> list[str]:
    """A round is reported when it is known who is missing: of two encoders', either may be first."""
    return sorted(lines, key=lambda line: words(line).partition(":")[0])


def words(line: str) -> str:
    return line.partition("] ")[2]


def test_a_life_has_in_it_what_is_compared(vendored: Life) -> None:
    for rank, record in enumerate(vendored):
        found = record.scenarios
        assert found["settings at the start"] == f"sync=bounded, timeout={PATIENT:g} s, on_timeout=fallback"
        for name in record.world:
            training = found[f"{name}: trained in a group"]
            _, calls, rounds, fallbacks, timeouts, ended = training["counters"]
            assert calls == rounds > 4 and (fallbacks, timeouts, ended) == (0, 0, ""), name
            end = training["end"]
            assert length_sized(end["private"]) and end["maximum"] > POSITIONS, name
            assert not length_sized(found[f"{name}: grown alone"][-1]["private"]), name
            assert found[f"{name}: local in a group"]["wrong rows"] == 0, name
            for own in ("Own", "My"):
                title = f".{own}{KINDS[name]}."
                assert len([line for line in record.of("not bounded, unless it calls super()") if title in line]) == 1
            assert found[f"{name}: uneven in a group"][1][4] == rank, name  # the one whose call nobody else made
            if rank == 0:
                within, without = (found[f"{name}: compiled {when}"]["breaks"] for when in ("in a group", "alone"))
                assert within > without, name
            if rank == 1:
                said, kinds = found[f"{name}: raising in a group"][0]
                assert "not every rank's length came within N s" in said and kinds[0] == "LengthSyncTimeout", name
        assert [len(record.of(text)) for text in ("not every rank's length", "recovered:")] == (
            [2 * len(record.world), len(record.world)] if rank == 1 else [0, 0]
        )
    for name in vendored[0].world:
        first, second = (record.scenarios[f"{name}: local in a group"]["end"] for record in vendored)
        assert first["maximum"] > second["maximum"] and first["private"] != second["private"], name


def length_sized(private: dict[str, Any]) -> list[str]:
    """The paths of what has grown for its process only; MaskedConv1d keeps tensors of its own, also in stock."""
    return [path for path in private if path.endswith((".pe", ".seq_range"))]
