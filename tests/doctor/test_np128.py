"""NP128: the monitor's name in the checkpoints' folder; a resume was run with NeMo's own callback."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo
PARAMS = "++exp_manager.checkpoint_callback_params"


RESUMES = "++exp_manager.resume_if_exists=true"


@pytest.mark.parametrize("folder", ["out/val_loss", "'out/{val_loss:.2f}'"])
def test_a_resume_stops(tmp_path: Path, folder: str) -> None:
    override = f"{PARAMS}.dirpath={folder}"
    (finding,) = found(tmp_path, "NP128", NEST, override, RESUMES)
    assert finding.severity is WARNING
    assert "a resume stops" in finding.what
    assert (
        found(tmp_path, "NP128", NEST, override, RESUMES.replace("true", "false")) == []
    )
    assert (
        found(tmp_path, "NP128", NEST, override, RESUMES, f"{PARAMS}.monitor=val_wer")
        == []
    )


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP128", NEST, RESUMES) == []
    assert found(tmp_path, "NP128", NEST, RESUMES, f"{PARAMS}.dirpath=out/a") == []
    assert (
        found(
            tmp_path,
            "NP128",
            NEST,
            RESUMES,
            f"{PARAMS}.filename='{{val_loss:.2f}}-{{epoch}}'",
        )
        == []
    )


@pytest.mark.installed
def test_nemo_fills_in_no_folder_and_stops(tmp_path: Path) -> None:
    module = pytest.importorskip("nemo.utils.callbacks.nemo_model_checkpoint")

    def resume(folder: str) -> None:
        settings = {
            "monitor": "val_loss",
            "save_top_k": 2,
            "n_resume": True,
            "filename": "{val_loss}-{epoch}-x",
        }
        callback = module.NeMoModelCheckpoint(dirpath=tmp_path / folder, **settings)
        path = Path(callback.format_checkpoint_name({"val_loss": 0.5, "epoch": 1}))
        assert path.is_relative_to(tmp_path / folder)
        path.parent.mkdir(parents=True)
        path.touch()
        assert (
            len(
                module.NeMoModelCheckpoint(
                    dirpath=tmp_path / folder, **settings
                ).best_k_models
            )
            == 1
        )

    resume("a")
    for folder in ("{val_loss}", "of val_loss"):
        with pytest.raises(ValueError, match="could not convert string to float"):
            resume(folder)
