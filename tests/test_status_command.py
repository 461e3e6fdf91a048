"""`nemo-patches status` in real environments: what it finds without importing NeMo, and its exit
code.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import nemo.package_info
import pytest
import torch
import transcripts
from interpreters import CHECKOUT, LAUNCHER, python

import nemo_patches
from nemo_patches.patching.metric_targets import METRIC_TARGETS
from nemo_patches.patching.targets import CHECKPOINT_TARGETS, TARGETS
from nemo_patches.tools.status import JSON_FORMAT, EnvironmentStatus


def status(
    *arguments: str, path: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    return python("-m", "nemo_patches", "status", *arguments, path=path, **variables)


def report(code: int, path: tuple[Path, ...] = (), **variables: str) -> dict[str, Any]:
    done = status("--json", path=path, **variables)
    assert done.returncode == code, done
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("format") == JSON_FORMAT
    assert set(found) == {field.name for field in fields(EnvironmentStatus)}
    return found


@pytest.mark.matrix
def test_it_tells_what_apply_would_do() -> None:
    found = report(1)  # off here, and would be patched by apply()
    would = {
        target["target"]
        for target in found["targets"]
        if target["file"] and not target["problem"]
    }
    nemo_patches.apply()
    try:
        done = nemo_patches.status()
        later = {
            skipped.target
            for skipped in done.skipped
            if "not imported yet" in skipped.reason
        }
        assert would == {*done.patched, *later}
    finally:
        nemo_patches.revert()
    assert {target["target"] for target in found["targets"]} == {
        str(one) for one in (*TARGETS, *CHECKPOINT_TARGETS)
    }
    assert found["versions"]["nemo"] == nemo.package_info.__shortversion__
    # As it is installed: the index's build does not say +cu130 there.
    installed = importlib.metadata.version("torch")
    assert found["versions"]["torch"] == installed
    assert torch.__version__.startswith(installed)
    assert found["versions"]["nemo_patches"] == nemo_patches.__version__
    assert found["reasons"] == []


def test_it_prints_the_same_for_a_person() -> None:
    done = status(NEMO_PATCHES_TIMEOUT="4", path=(CHECKOUT,))
    assert done.returncode == 0
    assert done.stdout.startswith("on: ")
    for said in (
        f"nemo {nemo.package_info.__shortversion__}",
        "timeout: 4 (NEMO_PATCHES_TIMEOUT)",
        "ConformerEncoder.update_max_seq_length: patched when it is imported",
        "this NeMo does not have it",
        "auto-apply: on",
    ):
        assert said in done.stdout
    assert "sync: " not in done.stdout  # as it is by default
    assert "settings: the defaults" in status(path=(CHECKOUT,)).stdout


def test_deferred_metrics_have_targets_of_their_own(tmp_path: Path) -> None:
    found = report(0, (CHECKOUT,), NEMO_PATCHES_METRICS="deferred")
    targets = (*TARGETS, *CHECKPOINT_TARGETS, *METRIC_TARGETS)
    assert {target["target"] for target in found["targets"]} == set(map(str, targets))
    deferring = [target for target in found["targets"] if "epoch" in target["target"]]
    assert all(target["file"] and not target["problem"] for target in deferring)
    path = checkout_of_nemo(tmp_path, "2.7.9")
    assert report(0, (CHECKOUT, path))["reasons"] == []
    found = report(1, (CHECKOUT, path), NEMO_PATCHES_METRICS="deferred")
    assert (
        found["state"] == "on"
        and "but the metrics: as in stock NeMo" in found["answer"]
    )
    reasons = found["reasons"]
    assert (
        "ModelPT.on_test_epoch_end: this NeMo has no nemo.core.classes.modelPT"
        in reasons
    )
    assert "WER.compute: this NeMo has no nemo.collections.asr.metrics.wer" in reasons


def test_it_imports_neither_nemos_collections_nor_torch() -> None:
    program = (
        "import sys\nfrom nemo_patches.tools.status import"
        " examine\nexamine()\nprint([name for name in sys.modules if name in ('torch',"
        " 'nemo.collections', 'wrapt')])"
    )
    assert python("-c", program).stdout == "[]\n"


def test_where_each_setting_comes_from() -> None:
    found = report(0, (CHECKOUT,), NEMO_PATCHES_SYNC="local")
    assert {"name": "sync", "value": "local", "source": "NEMO_PATCHES_SYNC"} in found[
        "settings"
    ]
    assert {"name": "timeout", "value": "10", "source": "default"} in found["settings"]


@pytest.mark.parametrize(
    ("path", "variables", "state", "said"),
    [
        ((), {}, "off here", "to switch it on: `nemo-patches run -- COMMAND`"),
        (
            (),
            {"NEMO_PATCHES_DISABLE": "1"},
            "off here",
            "unset NEMO_PATCHES_DISABLE, then `nemo-patches run",
        ),
        (
            (CHECKOUT,),
            {"NEMO_PATCHES_DISABLE": "1"},
            "off here",
            "to switch it on: unset NEMO_PATCHES_DISABLE",
        ),
        (
            (CHECKOUT,),
            {"NEMO_PATCHES_DISABLE": "x"},
            "cannot be",
            "NEMO_PATCHES_DISABLE='x' is not allowed",
        ),
        (
            (CHECKOUT,),
            {"NEMO_PATCHES_TIMEOUT": "soon"},
            "cannot be",
            "NEMO_PATCHES_TIMEOUT='soon' is not allowed",
        ),
    ],
)
def test_exit_code_1_and_why_where_it_is_not_on(
    path: tuple[Path, ...], variables: dict[str, str], state: str, said: str
) -> None:
    found = report(1, path, **variables)
    assert found["state"] == state
    assert said in found["answer"]
    assert {target["problem"] for target in found["targets"]} == {""}
    printed = status(path=path, **variables).stdout
    assert printed.startswith(found["answer"] + "\n")
    assert "would be" not in printed
    assert ("patched when it is imported" in printed) == (state == "on")


def test_exit_code_1_and_the_sentence_where_a_variable_is_misspelt() -> None:
    found = report(1, (CHECKOUT,), NEMO_PATCHES_TIMEOUTS="4")
    sentence = (
        "NEMO_PATCHES_TIMEOUTS is not a setting, and has no effect; did you mean"
        " NEMO_PATCHES_TIMEOUT?"
    )
    assert (found["misspelt"], found["reasons"]) == ([sentence], [])
    assert found["state"] == "on"
    assert (
        status(NEMO_PATCHES_TIMEOUTS="4", path=(CHECKOUT,)).stdout.splitlines()[1]
        == sentence
    )


def checkout_of_nemo(folder: Path, version: str, **changes: str) -> Path:
    """The installed NeMo's own files, enough of them for status, with changes."""
    installed = Path(nemo.package_info.__file__).parent
    modules = Path("collections", "asr", "modules")
    (folder / "nemo" / modules).mkdir(parents=True)
    (folder / "nemo" / "__init__.py").write_text("")
    (folder / "nemo" / "collections" / "__init__.py").write_text("")
    (folder / "nemo" / "package_info.py").write_text(
        f"__shortversion__ = __version__ = {version!r}\n"
    )
    for name in ("conformer_encoder.py", "conv_asr.py"):
        text = (installed / modules / name).read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / "nemo" / modules / name).write_text(text)
    return folder


def test_a_drifted_target(tmp_path: Path) -> None:
    path = checkout_of_nemo(tmp_path, "2.7.9", all_reduce="all_reduce_coalesced")
    found = report(1, (path,))
    reasons = found["reasons"]
    assert (found["state"], len(reasons)) == ("cannot be", 2)
    assert all(
        "without ['all_reduce']" in reason and "['all_reduce_coalesced']" in reason
        for reason in reasons
    )
    assert "ConformerEncoder.update_max_seq_length" in reasons[0]
    path = checkout_of_nemo(tmp_path / "other", "2.7.9", seq_length="frames")
    assert (
        "expected a plain function (self, seq_length, device), found (self, frames,"
        " device)" in str(report(1, (path,)))
    )


def test_an_unsupported_version(tmp_path: Path) -> None:
    path = checkout_of_nemo(tmp_path, "9.9.0")
    (reason,) = report(1, (CHECKOUT, path))["reasons"]
    assert "NeMo 9.9.0 is not supported; supported: 2.1, 2.2, 2.3, " in reason
    assert (
        "NeMo 9.9.0 is newer than any that was tested" in reason
        and "no difference (looked at: Conf" in reason
    )
    assert reason.endswith("NEMO_PATCHES_UNSUPPORTED=1 nemo-patches demo")
    changed = checkout_of_nemo(
        tmp_path / "changed", "3.1.0rc0", all_reduce="all_reduce_coalesced"
    )
    assert (
        "without ['all_reduce'] and with ['all_reduce_coalesced']"
        in report(1, (changed,))["reasons"][-1]
    )
    (reason,) = report(1, (checkout_of_nemo(tmp_path / "older", "2.0.0"),))["reasons"]
    assert reason.endswith(
        "for 1.23 and 2.0 there are diffs, and docs/vendors.md says why not more"
    )
    found = report(0, (CHECKOUT, path), NEMO_PATCHES_UNSUPPORTED="1")
    assert (found["state"], found["reasons"]) == ("on", [])


def test_exit_code_2_where_it_cannot_be_told(tmp_path: Path) -> None:
    path = checkout_of_nemo(tmp_path, "2.7.9", **{"import": "impo rt"})
    done = status(path=(path,))
    assert done.returncode == 2
    assert "conformer_encoder.py: invalid syntax" in done.stderr


@pytest.mark.parametrize("missing", ["nemo", "torch"])
def test_it_cannot_be_patched_where_nemo_or_torch_is_missing(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom nemo_patches.cli import"
        " main; main()"
    )
    done = python("-c", program, "status")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"cannot be patched: {missing} is not installed for ")
    found = json.loads(python("-c", program, "status", "--json").stdout)
    assert (found["format"], found["state"]) == (JSON_FORMAT, "cannot be")


def test_a_nemo_without_the_classes_or_without_a_version(tmp_path: Path) -> None:
    other = tmp_path / "nemo"
    (other / "collections").mkdir(parents=True)
    for file in (other / "__init__.py", other / "collections" / "__init__.py"):
        file.write_text("")
    done = status(path=(tmp_path,))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "nemo-patches status: it cannot be told: nemo: no version can be read"
    )
    told = json.loads(status("--json", path=(tmp_path,)).stdout)
    assert (told["format"], "no version" in told["error"]) == (JSON_FORMAT, True)
    (other / "package_info.py").write_text("__version__ = '3.0.0'\n")
    found = report(1, (CHECKOUT, tmp_path))
    assert found["state"] == "cannot be"
    assert found["reasons"] == [
        f"NeMo 3.0.0 at {other} has none of the classes that would be patched"
    ]


def test_auto_apply_and_what_it_chains(tmp_path: Path) -> None:
    vendor = tmp_path / "sitecustomize.py"
    vendor.write_text("")
    for ours in (CHECKOUT, LAUNCHER):
        found = report(0, (ours, tmp_path))
        assert (found["auto_apply"], found["chained"]) == ("on", str(vendor))
        found = report(1, (tmp_path, ours))
        assert found["state"] == "off here"
        assert found["auto_apply"] == "off"
        assert found["reasons"] == [
            f"{ours}/sitecustomize.py is on PYTHONPATH, but {vendor} comes first and"
            " does not run it"
        ]
        found = report(1, (ours, tmp_path), NEMO_PATCHES_DISABLE="1")
        assert (found["auto_apply"], found["chained"]) == (
            "off, NEMO_PATCHES_DISABLE=1",
            str(vendor),
        )
    assert report(0, (CHECKOUT,))["chained"] == ""
    assert report(1, (tmp_path,))["chained"] == str(vendor)


@pytest.mark.one_nemo
def test_the_words_of_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without versions. `checkout` stands for our own; the others are NeMo's, or a
    vendor's.
    """
    monkeypatch.chdir(tmp_path)
    for name, version, changes in (
        ("drifted", "2.7.9", {"all_reduce": "all_reduce_coalesced"}),
        ("newer", "9.9.0", {}),
        ("older", "2.0.0", {}),
        ("broken", "2.7.9", {"import": "impo rt"}),
    ):
        checkout_of_nemo(tmp_path / name, version, **changes)
    Path("shadowing").mkdir()
    Path("shadowing", "sitecustomize.py").write_text("")

    def shown(*folders: str, **variables: str) -> None:
        done = status(
            path=tuple(
                CHECKOUT if name == "checkout" else tmp_path / name for name in folders
            ),
            **variables,
        )
        sys.stdout.write(
            (done.stdout + done.stderr).replace(str(CHECKOUT), "/checkout")
        )
        raise SystemExit(done.returncode)

    def kept(_: str, line: str) -> bool:
        return not line.startswith("nemo_patches 0")

    transcripts.compare("status", tmp_path, {"status": shown}, kept)
