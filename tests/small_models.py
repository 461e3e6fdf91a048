"""Small real NeMo models, and batches for them, for tests of hangs and of whole trainings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nemo_patches.tools.demo import nest as demo_nest

LABELS = [" ", "a", "b", "c", "d"]
HIDDEN, FEATURES = 32, 16
PREPROCESSOR = {
    "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "sample_rate": 16000,
    "features": FEATURES,
    "n_fft": 512,
    "window_size": 0.025,
    "window_stride": 0.01,
    "normalize": "per_feature",
    "dither": 0.0,
    "pad_to": 0,
}
ENCODER = {
    "_target_": "nemo.collections.asr.modules.ConformerEncoder",
    "feat_in": FEATURES,
    "feat_out": -1,
    "n_layers": 1,
    "d_model": HIDDEN,
    "n_heads": 2,
    "subsampling": "dw_striding",
    "subsampling_factor": 4,
    "subsampling_conv_channels": 8,
    "conv_kernel_size": 5,
    **dict.fromkeys(
        ("dropout", "dropout_emb", "dropout_pre_encoder", "dropout_att"), 0.0
    ),
}
CTC_DECODER = {
    "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
    "feat_in": HIDDEN,
    "num_classes": len(LABELS),
    "vocabulary": LABELS,
}
COMMON: dict[str, Any] = {
    "sample_rate": 16000,
    "labels": LABELS,
    "preprocessor": PREPROCESSOR,
    "encoder": ENCODER,
    "optim": {"name": "sgd", "lr": 1e-4},
    "log_prediction": False,
}
CTC: dict[str, Any] = {**COMMON, "decoder": CTC_DECODER, "use_cer": True}


def ctc(trainer: Any) -> Any:
    from nemo.collections.asr.models import EncDecCTCModel

    return made(EncDecCTCModel, CTC, trainer)


def rnnt(trainer: Any, fused: bool = False, hybrid: bool = False) -> Any:
    """fused: the joint computes WER, sub-batch by sub-batch. hybrid: a CTC decoder, too."""
    from nemo.collections.asr import models

    prediction = {
        "pred_hidden": HIDDEN,
        "pred_rnn_layers": 1,
        "t_max": None,
        "dropout": 0.0,
    }
    joint = {"joint_hidden": HIDDEN, "activation": "relu", "dropout": 0.0}
    auxiliary = {
        "ctc_loss_weight": 0.3,
        "use_cer": True,
        "ctc_reduction": "mean_batch",
        "decoder": CTC_DECODER,
        "decoding": {"strategy": "greedy"},
    }
    config = {
        **COMMON,
        "compute_eval_loss": False,
        "use_cer": True,
        "model_defaults": {
            "enc_hidden": HIDDEN,
            "pred_hidden": HIDDEN,
            "joint_hidden": HIDDEN,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": prediction,
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": fused,
            "fused_batch_size": 2,
            "jointnet": joint,
        },
        "decoding": {"strategy": "greedy", "greedy": {"max_symbols": 2}},
        "loss": {"loss_name": "default"},
        **({"aux_ctc": auxiliary} if hybrid else {}),
    }
    return made(
        models.EncDecHybridRNNTCTCModel if hybrid else models.EncDecRNNTModel,
        config,
        trainer,
    )


def nest(trainer: Any, folder: Path, rank: int) -> Any:
    """The demo's, without data of its own; it takes the batches of `nest_batch`."""
    torch.manual_seed(0)
    return demo_nest.make(
        {**demo_nest.model(folder, rank), "train_ds": None, "validation_ds": None},
        trainer,
    )


def nest_batch(seed: int) -> Any:
    from nemo.collections.asr.data.ssl_dataset import AudioNoiseBatch

    signals = 0.1 * torch.randn(2, 32000, generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((2,), 32000)
    return AudioNoiseBatch(
        None, signals, lengths, torch.zeros_like(signals), lengths, signals, lengths
    )


def made(owner: type, config: dict[str, Any], trainer: Any) -> Any:
    torch.manual_seed(0)
    return owner(cfg=OmegaConf.create(config), trainer=trainer)


def batch(seed: int, size: int = 2) -> tuple[torch.Tensor, ...]:
    """Signals, their lengths, tokens, their lengths."""
    chance = torch.Generator().manual_seed(seed)
    samples = 4000 + 800 * (seed % 3)
    signals = 0.1 * torch.randn(size, samples, generator=chance)
    tokens = torch.randint(1, len(LABELS), (size, 4), generator=chance)
    return signals, torch.full((size,), samples), tokens, torch.full((size,), 4)


class Batches(Dataset[Any]):
    """With a length, like most of NeMo's; each item is a whole batch."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return batch(self.seeds[index])


class Stream(IterableDataset[Any]):
    """Without a length, like Lhotse's data sets."""

    def __init__(self, seeds: range, size: int = 2) -> None:
        self.seeds, self.size = seeds, size

    def __iter__(self) -> Iterator[Any]:
        return (batch(seed, self.size) for seed in self.seeds)


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **settings)


class Speech(pl.LightningModule):  # type: ignore[misc]  # Lightning's types are not followed
    """A user's own module around NeMo's Conformer. Its batches are numbers."""

    def __init__(self, **encoder: Any) -> None:
        super().__init__()
        self.encoder = conformer(**encoder)

    def training_step(self, number: int, batch_idx: int) -> Any:
        return encode(self.encoder, number).pow(2).mean()

    def validation_step(self, number: int, batch_idx: int) -> Any:
        return encode(self.encoder, number).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def conformer(**changes: Any) -> Any:
    from nemo.collections.asr.modules import ConformerEncoder

    settings = {name: value for name, value in ENCODER.items() if name != "_target_"}
    torch.manual_seed(0)
    return ConformerEncoder(**{**settings, **changes})


def encode(encoder: Any, number: int, frames: int = 60) -> Any:
    """The encoder's output for a batch of noise."""
    features = torch.randn(
        2, FEATURES, frames, generator=torch.Generator().manual_seed(number)
    )
    return encoder(audio_signal=features, length=torch.tensor([frames] * 2))[0]


def numbers(count: int) -> DataLoader[int]:
    return loader(range(count))
