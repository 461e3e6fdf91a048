"""The configuration of the demo's model: that of examples/nest/, small.

The examples are not in the wheel, so it is written out here; tests/test_examples.py compares them.
"""

from __future__ import annotations

from typing import Any

from nemo_patches.tools.demo.jobs import BATCH_SIZE, Job

FEATURES = 80  # mel bins
WIDTH = 32  # of the encoder
CODES = 64  # in the quantizer's codebook
CODE_WIDTH = 16
SUBSAMPLING = 8


def model(job: Job) -> dict[str, Any]:
    """NeMo's nest_fast-conformer.yaml with a small encoder and codebook; all that concerns length is as it is there."""

    def data(name: str, drop_last: bool) -> dict[str, Any]:
        return {
            "manifest_filepath": str(job.folder / f"{name}-{job.rank}.json"),
            "noise_manifest": str(job.folder / "noise.json"),
            "sample_rate": 16000,
            "channel_selector": "average",  # a user's audio may be stereo
            "batch_size": BATCH_SIZE,
            "shuffle": False,
            "drop_last": drop_last,
            "num_workers": 0,
            "max_duration": 60.0,
            "batch_augmentor": {
                "_target_": "nemo.collections.asr.modules.ssl_modules.MultiSpeakerNoiseAugmentation",
                "prob": 0.5,
                "noise_ratio": 0.5,
                "min_r_speech": -5.0,
                "max_r_speech": 5.0,
                "min_r_noise": -5.0,
                "max_r_noise": 20.0,
                "min_mix_rate": 0.5,
                "max_mix_rate": 0.5,
                "min_num_segments": 1,
                "max_num_segments": 1,
                "min_num_speakers": 1,
                "max_num_speakers": 1,
            },
        }

    return {
        "sample_rate": 16000,
        "num_classes": CODES,
        "num_books": 1,
        "code_dim": CODE_WIDTH,
        "squeeze_single": False,
        "mask_position": "pre_conv",
        "train_ds": data("train", drop_last=True),
        "validation_ds": data("validation", drop_last=False),
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "features": FEATURES,
            "n_fft": 512,
            "normalize": "per_feature",
            "dither": 1e-5,
            "pad_to": 16,
        },
        "spec_augment": {
            "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
            "freq_masks": 0,
            "time_masks": 0,
        },
        "masking": {
            "_target_": "nemo.collections.asr.modules.RandomBlockMasking",
            "feat_in": FEATURES,
            "block_size": 40,
            "mask_prob": 0.05,
            "freeze": True,
            "allow_overlap": True,
        },
        "quantizer": {
            "_target_": "nemo.collections.asr.modules.RandomProjectionVectorQuantizer",
            "feat_in": FEATURES,
            "code_dim": CODE_WIDTH,
            "num_books": 1,
            "num_classes": CODES,
            "dist_fn": "l2",
            "freeze": True,
            "squeeze_single": False,
            "combine_time_steps": SUBSAMPLING,
        },
        "encoder": {"_target_": "nemo.collections.asr.modules.ConformerEncoder", **conformer()},
        "decoder": {
            "_target_": "nemo.collections.asr.modules.MultiSoftmaxDecoder",
            "feat_in": WIDTH,
            "num_classes": CODES,
            "num_decoders": 1,
            "squeeze_single": False,
        },
        "loss": {
            "_target_": "nemo.collections.asr.losses.MultiMLMLoss",
            "combine_time_steps": SUBSAMPLING,
            "mask_threshold": 0.8,
            "num_decoders": 1,
            "squeeze_single": False,
        },
        "optim": {
            "name": "adamw",
            "lr": 5.0,
            "betas": [0.9, 0.98],
            "weight_decay": 1e-3,
            "sched": {"name": "NoamAnnealing", "d_model": WIDTH, "warmup_steps": 100},
        },
    }


def conformer() -> dict[str, Any]:
    return {
        "feat_in": FEATURES,
        "feat_out": -1,
        "n_layers": 2,
        "d_model": WIDTH,
        "subsampling": "dw_striding",
        "subsampling_factor": SUBSAMPLING,
        "subsampling_conv_channels": 16,
        "ff_expansion_factor": 2,
        "self_attention_model": "rel_pos",
        "n_heads": 2,
        "conv_kernel_size": 9,
    }
