"""Small real NeMo ASR models, and batches for them, for tests of whole trainings under Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

LABELS = [" ", "a", "b", "c", "d"]
HIDDEN, FEATURES = 32, 16
_PREPROCESSOR = {
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
_ENCODER = {
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
    **dict.fromkeys(("dropout", "dropout_emb", "dropout_pre_encoder", "dropout_att"), 0.0),
}
_CTC_DECODER = {
    "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
    "feat_in": HIDDEN,
    "num_classes": len(LABELS),
    "vocabulary": LABELS,
}
_COMMON: dict[str, Any] = {
    "sample_rate": 16000,
    "labels": LABELS,
    "preprocessor": _PREPROCESSOR,
    "encoder": _ENCODER,
    "optim": {"name": "sgd", "lr": 1e-4},
    "log_prediction": False,
}


def ctc(trainer: Any) -> Any:
    """It prints characters enough for a word error rate that is no 1.0."""
    from nemo.collections.asr.models import EncDecCTCModel

    class OfSeveralLoaders(EncDecCTCModel):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_nb)

    return _made(OfSeveralLoaders, {**_COMMON, "decoder": _CTC_DECODER, "use_cer": True}, trainer)


def _made(owner: type, config: dict[str, Any], trainer: Any) -> Any:
    from omegaconf import OmegaConf

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
    """Without a length, as Lhotse's and people's own; with `announced`, one that is a guess, as of tarred data."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        return map(batch, self.seeds)


class TarredStream(Stream):
    def __init__(self, seeds: range, announced: int) -> None:
        super().__init__(seeds)
        self.announced = announced

    def __len__(self) -> int:
        return self.announced


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **settings)
