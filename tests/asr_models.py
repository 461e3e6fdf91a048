"""Small real NeMo ASR models, and batches for them, for tests of whole trainings under Lightning."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import small_models
import torch
from small_models import (
    COMMON,
    CTC,
    HIDDEN,
    LABELS,
    Batches,
    Stream,
    batch,
    loader,
    made,
    nest_batch,
    rnnt,
)

# For the tests, with what follows.
__all__ = ["LABELS", "Batches", "Stream", "batch", "loader", "nest_batch", "rnnt"]
HANG_S = 6.0  # for which a rank of stock that hangs makes no progress


def ctc(trainer: Any) -> Any:
    """It prints characters enough for a word error rate that is no 1.0."""
    from nemo.collections.asr.models import EncDecCTCModel

    class OfSeveralLoaders(EncDecCTCModel):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            return super().training_step(
                batch["a"] if isinstance(batch, dict) else batch, batch_nb
            )

    return made(OfSeveralLoaders, CTC, trainer)


def ctc_with_bleu(trainer: Any) -> Any:
    """With the states that attention models have beside WER's, kept as those keep them."""
    from nemo.collections.asr.metrics import BLEU

    model = ctc(trainer)
    owner = type(model)

    class WithBleu(owner):  # type: ignore[misc, valid-type]
        def validation_pass(
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> Any:
            logs = super().validation_pass(batch, batch_idx, dataloader_idx)
            signals, lengths, tokens, token_lengths = batch
            predictions, predicted, _ = self.forward(
                input_signal=signals, input_signal_length=lengths
            )
            self.bleu.update(predictions, predicted, tokens, token_lengths)
            logs.update(self.bleu.compute(prefix="val_"))
            self.bleu.reset()
            return logs

    model.__class__ = WithBleu
    model.bleu = BLEU(model.decoding, log_prediction=False)
    # In 2.1 to 2.4 it reads that and does not set it.
    model.bleu.fold_consecutive = True
    return model


def aed(trainer: Any) -> Any:
    """With an attention decoder, as Canary. It says the prompt's last token again and again, and
    the answers mostly are
    that: so its character error rate and its BLEU are neither 0 nor 1."""
    from nemo.collections.asr.data.audio_to_text_lhotse_prompted import (
        PromptedAudioToTextMiniBatch,
    )
    from nemo.collections.asr.models import EncDecMultiTaskModel
    from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer
    from nemo.collections.common.tokenizers.sentencepiece_tokenizer import (
        create_spt_model,
    )

    class OfPlainBatches(EncDecMultiTaskModel):  # type: ignore[misc]
        def validation_pass(self, batch: Any, *args: Any, **more: Any) -> Any:
            signals, lengths, tokens, _ = batch
            size, special = len(signals), self.tokenizer.special_tokens
            names = (
                "<|startoftranscript|>",
                "<|en|>",
                "<|transcribe|>",
                "<|en|>",
                "<|nopnc|>",
            )
            prompts = torch.tensor([[special[name] for name in names]] * size)
            answers = torch.where(
                tokens < 4, special["<|nopnc|>"], self.tokenizer.vocab_size - 1
            )
            whole = torch.cat(
                [prompts, answers, torch.full((size, 1), self.tokenizer.eos_id)], 1
            )
            texts = (
                (text, torch.full((size,), text.shape[1]))
                for text in (answers, prompts, whole)
            )
            cuts = [SimpleNamespace(custom={})] * size
            return super().validation_pass(
                PromptedAudioToTextMiniBatch(
                    signals, lengths, *itertools.chain(*texts), cuts
                ),
                *args,
                **more,
            )

    transformer = {
        "max_sequence_length": 64,
        "num_layers": 1,
        "num_attention_heads": 2,
        "hidden_act": "relu",
        "pre_ln": True,
        **dict.fromkeys(("hidden_size", "inner_size"), HIDDEN),
        **dict.fromkeys(
            (
                "embedding_dropout",
                "ffn_dropout",
                "attn_score_dropout",
                "attn_layer_dropout",
            ),
            0.0,
        ),
    }
    head = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_classes": None,
        "log_softmax": True,
        "dropout": 0.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        text, special, english = (
            Path(folder, name) for name in ("text", "special", "english")
        )
        text.write_text("ab cd\n")
        CanaryTokenizer.build_special_tokenizer(["en", "transcribe"], str(special))
        create_spt_model(
            str(text), 7, -1, False, tokenizer_type="char", output_dir=str(english)
        )
        folders = {"spl_tokens": special, "en": english}
        config = {
            **{
                name: COMMON[name]
                for name in ("sample_rate", "preprocessor", "encoder", "optim")
            },
            "prompt_format": "canary",
            "model_defaults": dict.fromkeys(
                ("asr_enc_hidden", "lm_enc_hidden", "lm_dec_hidden"), HIDDEN
            ),
            "tokenizer": {
                "type": "agg",
                "langs": {
                    name: {"dir": str(model), "type": "bpe"}
                    for name, model in folders.items()
                },
                "custom_tokenizer": {
                    "_target_": f"{CanaryTokenizer.__module__}.CanaryTokenizer"
                },
            },
            "transf_decoder": {
                "_target_": (
                    "nemo.collections.asr.modules.transformer.get_nemo_transformer"
                ),
                "encoder": None,
                "config_dict": transformer,
            },
            "head": {
                "_target_": (
                    "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier"
                ),
                **head,
            },
            "decoding": {
                "strategy": "beam",
                "beam": {"beam_size": 1, "max_generation_delta": 5},
            },
            "loss": {
                "_target_": (
                    "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss"
                )
            },
        }
        model = made(OfPlainBatches, config, trainer)
    model.wer.use_cer = True
    return model


def nest(trainer: Any) -> Any:
    """NeMo's self-supervised model; it takes the batches of `nest_batch`."""
    return small_models.nest(trainer, Path("/nowhere"), 0)


class TarredStream(Stream):
    def __init__(self, seeds: range, announced: int) -> None:
        super().__init__(seeds)
        self.announced = announced

    def __len__(self) -> int:
        return self.announced


def trainer_of(callbacks: Any = (), **settings: Any) -> Any:
    """A small trainer under DDP, of the ranks that run it."""
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        },
    )


def prepare() -> None:
    """In a rank, before its first trainer."""
    # The group is there.
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    from nemo.utils import logging as nemo_logging

    warnings.filterwarnings("ignore")
    nemo_logging.setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def name_loaders(model: Any, loaders: Any) -> None:
    """As NeMo's setup_multiple_validation_data and its test twin do, where there are several."""
    if isinstance(loaders, list):
        names = [f"{number}_" for number in range(len(loaders))]
        model._validation_dl = model._test_dl = loaders
        model._validation_names = model._test_names = names
        model._val_dl_idx = model._test_dl_idx = 0


def hang_watch() -> Any:
    """A callback for stock: it ends the rank where Lightning begins or ends no batch for HANG_S,
    and says so.
    """
    import lightning.pytorch as pl

    progressed = threading.Event()

    class HangWatch(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            progressed.set()

        on_train_start = on_validation_start = on_validation_batch_end = (
            on_train_batch_end
        )

    def watch() -> None:
        progressed.wait()
        while progressed.wait(HANG_S):
            progressed.clear()
        print("no progress", file=sys.stderr, flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    return HangWatch()
