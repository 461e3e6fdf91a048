"""NP120: keys that look like typing errors."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

from nemo_patches.patching.targets import TARGETS
from nemo_patches.tools.doctor import against, known_keys
from nemo_patches.tools.doctor.encoders import FLAG

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.encoder.sync_max_audio_len", "sync_max_audio_length"),
        ("model.encoder.pos_emb_maxlen", "pos_emb_max_len"),
        ("trainer.use_distributed_samplers", "use_distributed_sampler"),
        ("exp_manager.create_premption_callback", "create_preemption_callback"),
    ],
)
def test_a_typing_error_is_named_with_what_was_meant(
    tmp_path: Path, key: str, meant: str
) -> None:
    text = (
        LHOTSE.replace("  use_distributed_sampler: false\n", "")
        + "exp_manager: {name: x}\n"
    )
    (finding,) = found(tmp_path, "NP120", text, f"+{key}=3")
    assert finding.severity is WARNING
    assert key in finding.what
    assert meant in finding.what


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("gpus", "devices, with accelerator: gpu"),
        ("replace_sampler_ddp", "use_distributed_sampler"),
        ("something_of_ones_own", "no such key"),
    ],
)
def test_the_trainer_takes_no_key_that_it_does_not_know(
    tmp_path: Path, key: str, instead: str
) -> None:
    (finding,) = found(
        tmp_path, "NP120", NEST, f"+trainer.{key}=1", "trainer.devices=1"
    )
    assert finding.severity is WARNING
    assert f"trainer.{key} is not known" in finding.what
    assert finding.instead == instead


@pytest.mark.parametrize(
    "override",
    [
        "+model.train_ds.max_durations=1",  # NeMo ignores it
        "+model.decoder={_target_: nemo.collections.asr.modules.TransformerDecoder}",
        "+model.other.batchsize=1",
        (
            "+model.estimator={_target_:"
            " nemo.collections.audio.modules.SpectrogramConformer,"
            " sync_max_audio_len: 1}"
        ),
        "+trainer={_target_: nemo.lightning.Trainer, device: 2}",
        "+mine={devics: 1}",
        "model.encoder._target_=my.models.ConformerEncodr",
        "model.encoder._target_=???",
    ],
)
def test_none_for_keys_of_ones_own(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP120", NEST) == []
    assert found(tmp_path, "NP120", NEST, override) == []


@pytest.mark.installed
@pytest.mark.skipif(
    importlib.util.find_spec("nemo") is None, reason="NeMo is not installed"
)
def test_the_known_keys_are_those_of_the_installed_nemo_and_lightning() -> None:
    """Read from the sources, so that a new release shows here and nothing is imported for it."""
    nemo, lightning = (
        Path(str(importlib.util.find_spec(name).origin)).parent
        for name in ("nemo", "lightning")
    )  # type: ignore[union-attr]
    asr = nemo / "collections" / "asr" / "modules"
    for name, entry in known_keys.ENCODERS.items():
        for path in (
            asr / "conformer_encoder.py",
            asr / "squeezeformer_encoder.py",
            asr / "conv_asr.py",
        ):
            for own in (name, f"{name}Adapter"):
                assert parameters(path, own) <= set(entry["keys"]), own
    assert (
        parameters(lightning / "pytorch" / "trainer" / "trainer.py", "Trainer")
        <= known_keys.TRAINER
    )
    assert (
        fields(nemo / "utils" / "exp_manager.py", "ExpManagerConfig")
        <= known_keys.EXP_MANAGER
    )


def test_the_encoders_are_those_that_are_patched() -> None:
    """A new target needs its entry in known_keys.yaml, with the keys that its class takes."""
    patched = [
        target
        for target in TARGETS
        if target.module.startswith("nemo.collections.asr.modules.")
    ]
    assert {target.owner for target in patched} == set(known_keys.ENCODERS)
    for target in patched:
        with_flag = any(FLAG in reads for reads in target.reads)
        assert with_flag is (FLAG in known_keys.ENCODERS[target.owner]["keys"])
        assert bool(target.setter) is (
            "pos_emb_max_len" in known_keys.ENCODERS[target.owner]["keys"]
        )


def body(path: Path, name: str) -> list[ast.stmt]:
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return [
        inner
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for inner in node.body
    ]


def parameters(path: Path, name: str) -> set[str]:
    made = [
        node
        for node in body(path, name)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    return {
        found.arg for node in made for found in (*node.args.args, *node.args.kwonlyargs)
    } - {"self"}


def fields(path: Path, name: str) -> set[str]:
    return {
        node.target.id
        for node in body(path, name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.installed
@pytest.mark.skipif(
    importlib.util.find_spec("nemo") is None, reason="NeMo is not installed"
)
def test_the_defaults_are_those_of_the_installed_nemo_and_lightning() -> None:
    """What --against takes where a setting is not there."""
    nemo, lightning = (
        Path(str(importlib.util.find_spec(name).origin)).parent
        for name in ("nemo", "lightning")
    )  # type: ignore[union-attr]
    asr = nemo / "collections" / "asr" / "modules"
    facts = against.facts()["defaults"]
    for path, name, known in (
        (asr / "conformer_encoder.py", "ConformerEncoder", facts["encoder"]),
        (
            asr / "audio_preprocessing.py",
            "AudioToMelSpectrogramPreprocessor",
            facts["preprocessor"],
        ),
    ):
        own = defaults(path, name)
        assert {key: own[key] for key in known} == known
    own = defaults(lightning / "pytorch" / "trainer" / "trainer.py", "Trainer")
    # None is what Lightning replaces by these, in its own words: limits of 1.0, precision 32, no
    # sync_batchnorm
    trainer = facts["trainer"]
    assert {key: own[key] for key in trainer if own[key] is not None} == {
        key: value for key, value in trainer.items() if own[key] is not None
    }


def defaults(path: Path, name: str) -> dict[str, object]:
    """Of a class's __init__, those that are written as plain values."""
    made = next(
        node
        for node in body(path, name)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    plain = list(
        zip(reversed(made.args.args), reversed(made.args.defaults), strict=False)
    )
    plain += list(zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True))  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for argument, value in plain:
        with contextlib.suppress(ValueError, TypeError):
            values[argument.arg] = ast.literal_eval(value)
    return values


def test_what_is_the_default_is_in_no_reference() -> None:
    for name in ("nest", "fastconformer_ctc", "salm"):
        given = against.reference(name)
        assert given and not [
            key
            for key, value in given.items()
            if against._default(tuple(key.split("."))) is value
        ]
