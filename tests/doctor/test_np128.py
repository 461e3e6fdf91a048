"""NP128: a metric in a checkpoint's folder; what becomes of it was run with NeMo's own callback."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo
PARAMS = "++exp_manager.checkpoint_callback_params"


@pytest.mark.parametrize("override", ["dirpath='out/{val_loss:.2f}'", "filename='{val_loss:.2f}/{epoch}'"])
def test_it_is_found_in_both_places(tmp_path: Path, override: str) -> None:
    (finding,) = found(tmp_path, "NP128", NEST, f"{PARAMS}.{override}")
    assert finding.severity is WARNING
    assert "{val_loss:.2f}" in finding.what


@pytest.mark.parametrize("override", ["filename='{val_loss:.2f}-{epoch}'", "filename='a/{val_loss}'", "dirpath=out/a"])
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP128", NEST) == []
    assert found(tmp_path, "NP128", NEST, f"{PARAMS}.{override}") == []


def test_the_monitors_name_alone_where_the_job_resumes(tmp_path: Path) -> None:
    folder, resume = f"{PARAMS}.dirpath=out/val_loss", "++exp_manager.resume_if_exists"
    (finding,) = found(tmp_path, "NP128", NEST, folder, f"{resume}=true")
    assert "a resume stops" in finding.what
    assert found(tmp_path, "NP128", NEST, folder, f"{resume}=false") == []
    assert found(tmp_path, "NP128", NEST, folder, f"{resume}=true", f"{PARAMS}.monitor=val_wer") == []


def test_nemo_fills_in_no_folder_and_stops_or_forgets_the_best(tmp_path: Path) -> None:
    module = pytest.importorskip("nemo.utils.callbacks.nemo_model_checkpoint")

    def best(folder: str, filename: str) -> int:
        """How many NeMo knows after a resume."""
        settings = {"monitor": "val_loss", "save_top_k": 2, "n_resume": True}
        callback = module.NeMoModelCheckpoint(dirpath=tmp_path / folder, filename=filename, **settings)
        path = Path(callback.format_checkpoint_name({"val_loss": 0.5, "epoch": 1}))
        assert path.is_relative_to(tmp_path / folder)
        path.parent.mkdir(parents=True)
        path.touch()
        return len(module.NeMoModelCheckpoint(dirpath=tmp_path / folder, filename=filename, **settings).best_k_models)

    assert best("a", "{val_loss}-{epoch}-x") == 1
    assert best("b", "{val_loss}/{epoch}-x") == 0
    for folder in ("{val_loss}", "of val_loss"):
        with pytest.raises(ValueError, match="could not convert string to float"):
            best(folder, "{val_loss}-{epoch}-x")
