"""Recipes as people train them, clean, and what one changed key makes of them: the expectation was
written first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, yaml_text
from nemo_patches.tools.doctor.finding import Severity
from nemo_patches.tools.doctor.job import Job

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

ENCODER = """\
  sample_rate: 16000
  preprocessor: {_target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor, window_stride: 0.01}
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder, pos_emb_max_len: 5000, conv_norm_type: batch_norm}
"""
TRAINER = """\
trainer:
  devices: 8
  num_nodes: 4
  accelerator: gpu
  precision: bf16-mixed
  max_steps: 100000
  sync_batchnorm: true
  use_distributed_sampler: false
"""
EXP = (
    "exp_manager: {exp_dir: null, create_checkpoint_callback: true, resume_if_exists:"
    " true}\n"
)

RECIPES = {
    # FastConformer transducer on Lhotse and tar files, as the larger models are trained.
    "parakeet": (
        f"""\
model:
{ENCODER}  train_ds:
    use_lhotse: true
    input_cfg:
    - {{type: nemo_tarred, manifest_filepath: a__OP_0..511_CL_.json, tarred_audio_filepaths: a__OP_0..511_CL_.tar}}
    - {{type: nemo_tarred, manifest_filepath: b__OP_0..255_CL_.json, tarred_audio_filepaths: b__OP_0..255_CL_.tar}}
    shuffle: true
    num_workers: 4
    max_duration: 40
    batch_duration: 600
    use_bucketing: true
    num_buckets: 30
  validation_ds:
    {{use_lhotse: true, manifest_filepath: [dev1.json, dev2.json], batch_size: 4, max_duration: 40, num_workers: 4}}
  joint: {{_target_: nemo.collections.asr.modules.RNNTJoint, fuse_loss_wer: true, fused_batch_size: 4}}
{TRAINER}  strategy: {{_target_: lightning.pytorch.strategies.DDPStrategy, gradient_as_bucket_view: true}}
  limit_train_batches: 1000
  val_check_interval: 1000
{EXP}"""
    ),
    # Multitask with a transformer decoder.
    "canary": (
        f"""\
model:
{ENCODER}  transf_decoder: {{_target_: nemo.collections.asr.modules.transformer.get_nemo_transformer}}
  train_ds:
    use_lhotse: true
    tarred_audio_filepaths: audio__OP_0..1023_CL_.tar
    manifest_filepath: sharded__OP_0..1023_CL_.json
    shuffle: true
    shard_seed: randomized
    num_workers: 8
    max_duration: 40
    batch_duration: 360
    quadratic_duration: 15
  validation_ds: {{use_lhotse: true, manifest_filepath: dev.json, batch_size: 8, shuffle: false, max_duration: 40}}
{TRAINER}  strategy: ddp
  limit_train_batches: 20000
  val_check_interval: 20000
  max_epochs: null
{EXP}"""
    ),
    # Self-supervised, on NeMo's own data loader.
    "nest": (
        f"""\
model:
{ENCODER}  train_ds:
    manifest_filepath: train.json
    batch_size: 8
    shuffle: true
    num_workers: 8
    max_duration: 40
    drop_last: true
    is_tarred: false
  validation_ds: {{manifest_filepath: dev.json, batch_size: 8, num_workers: 4, max_duration: 40}}
{TRAINER.replace("use_distributed_sampler: false", "use_distributed_sampler: true")}  strategy: ddp
{EXP}"""
    ),
    # End-to-end diarization.
    "sortformer": (
        f"""\
model:
{ENCODER}  sortformer_modules: {{_target_: nemo.collections.asr.modules.sortformer_modules.SortformerModules}}
  train_ds: {{manifest_filepath: train.json, batch_size: 4, session_len_sec: 40, num_workers: 4}}
  validation_ds: {{manifest_filepath: dev.json, batch_size: 4, session_len_sec: 40, num_workers: 4}}
{TRAINER.replace("sampler: false", "sampler: true")}  strategy: ddp_find_unused_parameters_true
{EXP}"""
    ),
    # A language model that listens (speechlm2), sharded.
    "salm": (
        f"""\
model:
  pretrained_asr: nvidia/canary-1b-flash
  perception: {{modality_adapter: {{_target_: nemo.collections.asr.modules.ConformerEncoder, n_layers: 2}}}}
data:
  train_ds:
    input_cfg: train.yaml
    shuffle: true
    shard_seed: randomized
    seed: 42
    num_workers: 2
    use_multimodal_sampling: true
    batch_tokens: 4000
  validation_ds: {{datasets: {{dev: {{shar_path: dev}}}}, batch_size: 8, seed: 42, shard_seed: randomized}}
{TRAINER}  strategy:
    _target_: lightning.pytorch.strategies.ModelParallelStrategy
    data_parallel_size: 32
    tensor_parallel_size: 1
  limit_train_batches: 100
  val_check_interval: 100
{EXP}"""
    ),
    # Cache-aware streaming, on NeMo's own tar files.
    "cache_aware": (
        f"""\
model:
{ENCODER.replace("pos_emb_max_len", "att_context_size: [70, 13], pos_emb_max_len")}  train_ds:
    manifest_filepath: tarred_audio_manifest.json
    tarred_audio_filepaths: audio__OP_0..1023_CL_.tar
    is_tarred: true
    batch_size: 16
    num_workers: 8
  validation_ds: {{manifest_filepath: dev.json, batch_size: 16, num_workers: 8, max_duration: 40}}
  joint: {{_target_: nemo.collections.asr.modules.RNNTJoint, fuse_loss_wer: true, fused_batch_size: 16}}
{TRAINER.replace("use_distributed_sampler: false", "use_distributed_sampler: true")}  strategy: ddp
{EXP}"""
    ),
    # Transducer and CTC together, on Lhotse and plain files.
    "hybrid": (
        f"""\
model:
{ENCODER}  aux_ctc: {{ctc_loss_weight: 0.3}}
  train_ds:
    use_lhotse: true
    manifest_filepath: train.json
    shuffle: true
    shard_seed: 42
    max_duration: 20
    batch_duration: 300
    num_workers: 8
  validation_ds: {{use_lhotse: true, manifest_filepath: dev.json, batch_size: 16, max_duration: 20}}
{TRAINER}  strategy: ddp
{EXP}"""
    ),
}
OF_NEARLY_ALL = (
    "NP005",
    "NP101",
)  # notes that nearly every config gets
W, E = "warning", "error"
DDP = "trainer.strategy={_target_:lightning.pytorch.strategies.DDPStrategy,"

# recipe, what is changed, what an expert says of it: errors and warnings, by rule
CASES: list[tuple[str, list[str], list[str]]] = [
    # parakeet
    ("parakeet", ["~trainer.limit_train_batches"], [f"NP104 {W}"]),
    (
        "parakeet",
        ["trainer.limit_train_batches=1.0", "trainer.val_check_interval=1.0"],
        [f"NP104 {W}"],
    ),
    ("parakeet", ["trainer.limit_train_batches=1000.0"], []),
    ("parakeet", ["trainer.limit_train_batches=500"], [f"NP123 {W}"]),
    (
        "parakeet",
        ["trainer.val_check_interval=2000", "+trainer.check_val_every_n_epoch=null"],
        [],
    ),
    ("parakeet", ["+model.train_ds.shard_seed=0"], [f"NP122 {W}"]),
    ("parakeet", ["+model.train_ds.shard_seed=randomized"], []),
    (
        "parakeet",
        ["+model.train_ds.shard_seed=randomized", "model.train_ds.num_workers=0"],
        [f"NP122 {W}"],
    ),
    ("parakeet", ["model.validation_ds.batch_size=16"], [f"NP116 {E}"]),
    (
        "parakeet",
        ["model.validation_ds.batch_size=16", "model.joint.fuse_loss_wer=false"],
        [],
    ),
    (
        "parakeet",
        [
            "model.validation_ds.batch_size=16",
            "trainer.devices=1",
            "trainer.num_nodes=1",
        ],
        [],
    ),
    ("parakeet", ["+model.validation_ds.shar_path=dev"], [f"NP108 {E}"]),
    (
        "parakeet",
        ["+model.validation_ds.shar_path=dev", "+trainer.limit_val_batches=50"],
        [],
    ),
    (
        "parakeet",
        [
            "+model.validation_ds.shar_path=dev",
            "+model.validation_ds.force_finite=true",
        ],
        [f"NP108 {W}"],
    ),
    ("parakeet", ["+model.train_ds.force_finite=true"], []),
    (
        "parakeet",
        ["+model.train_ds.force_finite=true", "~trainer.limit_train_batches"],
        [f"NP104 {W}", f"NP105 {E}"],  # the model asks for a length
    ),
    ("parakeet", ["model.train_ds.max_duration=60"], []),
    (
        "parakeet",
        [
            "model.train_ds.max_duration=60",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [f"NP102 {E}"],
    ),
    (
        "parakeet",
        ["model.train_ds.max_duration=60", "model.encoder.pos_emb_max_len=6016"],
        [],
    ),
    (
        "parakeet",
        ["model.train_ds.max_duration=60", "+trainer.strategy.broadcast_buffers=false"],
        [],
    ),
    (
        "parakeet",
        [
            "model.train_ds.max_duration=60",
            "+model.encoder.self_attention_model=rel_pos_local_attn",
        ],
        [],
    ),
    ("parakeet", ["+trainer.strategy.timeout=7200"], [f"NP119 {W}"]),
    ("parakeet", ["model.train_ds.batch_duration=null"], [f"NP111 {W}"]),
    ("parakeet", ["+trainer.gpus=8"], [f"NP120 {W}"]),
    ("parakeet", ["model.train_ds.max_duration=-1"], [f"NP125 {W}"]),
    # canary
    ("canary", ["+model.train_ds.is_tarred=true"], []),
    (
        "canary",
        ["trainer.limit_train_batches=1.0"],
        [],
    ),  # it validates by batches, and asks for no length
    (
        "canary",
        ["trainer.limit_train_batches=1.0", "trainer.val_check_interval=1.0"],
        [f"NP104 {W}"],
    ),
    (
        "canary",
        ["trainer.limit_train_batches=1.0", "+model.train_ds.is_tarred=true"],
        [f"NP104 {W}"],
    ),
    ("canary", ["model.train_ds.shuffle=false"], [f"NP122 {W}"]),
    ("canary", ["model.train_ds.shard_seed=1234"], [f"NP122 {W}"]),
    (
        "canary",
        [
            "model.train_ds.tarred_audio_filepaths=null",
            "model.train_ds.shard_seed=trng",
        ],
        [f"NP122 {W}"],
    ),
    ("canary", ["trainer.strategy=null"], [f"NP123 {W}"]),
    ("canary", ["trainer.strategy=ddpp"], [f"NP123 {W}"]),
    ("canary", ["trainer.precision=bfloat16"], [f"NP123 {W}"]),
    ("canary", ["trainer.use_distributed_sampler=true"], [f"NP103 {W}"]),
    # nest
    ("nest", ["model.train_ds.max_duration=60"], []),
    (
        "nest",
        ["model.train_ds.max_duration=60", "trainer.devices=1", "trainer.num_nodes=1"],
        [],
    ),
    ("nest", ["model.train_ds.is_tarred=true"], [f"NP107 {W}"]),
    (
        "nest",
        ["model.train_ds.is_tarred=true", "+trainer.limit_train_batches=1000"],
        [],
    ),
    (
        "nest",
        [
            "model.validation_ds.max_duration=null",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [f"NP102 {W}"],
    ),
    ("nest", ["+model.encoder.sync_max_audio_length=false"], []),
    ("nest", ["trainer.accelerator=ddp"], [f"NP123 {W}"]),
    ("nest", ["model.encoder.pos_emb_max_len=null"], [f"NP102 {W}"]),
    (
        "nest",
        ["~trainer.strategy", DDP.replace("trainer", "+trainer") + "timeout:3600}"],
        [f"NP119 {W}"],
    ),
    ("nest", ["+model.encoder.sync_max_audio_len=false"], [f"NP120 {W}"]),
    # sortformer
    ("sortformer", ["model.train_ds.session_len_sec=90"], []),
    (
        "sortformer",
        [
            "model.train_ds.session_len_sec=90",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [f"NP102 {E}"],
    ),
    (
        "sortformer",
        [
            "model.train_ds.session_len_sec=90",
            "trainer.devices=1",
            "trainer.num_nodes=1",
        ],
        [],
    ),
    ("sortformer", ["model.train_ds.session_len_sec=-1"], []),
    # salm
    ("salm", ["trainer.limit_train_batches=1.0"], []),  # it validates by batches
    (
        "salm",
        ["trainer.limit_train_batches=1.0", "trainer.val_check_interval=1.0"],
        [f"NP104 {W}"],
    ),
    ("salm", ["data.train_ds.input_cfg=elsewhere.yaml"], [f"NP005 {W}"]),
    ("salm", ["data.train_ds.input_cfg=s3://bucket/train.yaml"], [f"NP005 {W}"]),
    ("salm", ["data.train_ds.input_cfg=${oc.env:DATA}/train.yaml"], []),
    ("salm", ["data.train_ds.input_cfg='???'"], []),
    ("salm", ["trainer.val_check_interval=0.5"], []),  # of the limit
    (
        "salm",
        ["trainer.val_check_interval=0.5", "trainer.limit_train_batches=1.0"],
        [f"NP104 {W}", f"NP123 {W}"],
    ),
    (
        "salm",
        [
            "++data.train_ds={multi_config:true,asr:{shar_path:x,batch_size:4}}",
            "~data.train_ds.seed",
        ],
        [f"NP124 {W}"],
    ),
    ("salm", ["+trainer.strategy.timeout=3600"], [f"NP119 {W}"]),
    (
        "salm",
        ["trainer.use_distributed_sampler=true"],
        [f"NP103 {W}"],
    ),  # its validation set is made no stream
    # cache-aware, on tar files
    ("cache_aware", ["trainer.num_nodes=200"], [f"NP106 {W}"]),
    ("cache_aware", ["+model.train_ds.max_duration=20"], [f"NP107 {W}"]),
    (
        "cache_aware",
        ["+model.train_ds.max_duration=20", "+trainer.fast_dev_run=true"],
        [],
    ),
    (
        "cache_aware",
        ["+model.train_ds.tarred_shard_strategy=replicate", "trainer.num_nodes=200"],
        [],
    ),
    ("cache_aware", ["+model.validation_ds.is_tarred=true"], [f"NP108 {W}"]),
    # hybrid, on plain files
    ("hybrid", ["model.train_ds.shard_seed=trng"], [f"NP122 {W}"]),
    ("hybrid", ["~model.train_ds.shard_seed"], [f"NP122 {W}"]),
    (
        "hybrid",
        ["~model.train_ds.shard_seed", "trainer.devices=1", "trainer.num_nodes=1"],
        [],
    ),
    ("hybrid", ["trainer.strategy=fsdp"], []),
    ("hybrid", ["trainer.strategy=deepspeed_stage_2"], []),
    ("hybrid", ["+trainer.replace_sampler_ddp=false"], [f"NP120 {W}"]),
    ("hybrid", ["+trainer.limit_train_batches=0.5"], [f"NP123 {W}"]),
    ("hybrid", ["~trainer.use_distributed_sampler"], [f"NP103 {W}"]),
    (
        "hybrid",
        ["model.train_ds.manifest_filepath=[[a.json],[b.json]]"],
        [f"NP104 {W}"],
    ),
    (
        "hybrid",
        [
            "model.train_ds.manifest_filepath=[[a.json],[b.json]]",
            "+trainer.val_check_interval=500",
        ],
        [],
    ),
]
LHOTSE_VALIDATION = "++model.validation_ds.use_lhotse=true"
NO_DDP_SAMPLER = "trainer.use_distributed_sampler=false"
ONE_GPU = ["trainer.devices=1", "trainer.num_nodes=1"]
FULLY_SHARDED = "trainer.strategy=fsdp"
MODEL_PARALLEL = (
    "trainer.strategy={_target_: lightning.pytorch.strategies.ModelParallelStrategy}"
)
SHARDS = "audio__OP_0..511_CL_.tar"
JOINT = (
    "+model.joint={_target_: nemo.collections.asr.modules.RNNTJoint, fuse_loss_wer:"
    " true, fused_batch_size: 4}"
)
SHAR = (
    "model.train_ds={use_lhotse: true, shar_path: shar, num_workers: 4, shuffle: true,"
    " batch_duration: 600}"
)
SETS = "asr: {shar_path: x, batch_size: 4}, st: {shar_path: y, batch_size: 4}"
MULTI = f"data.train_ds={{multi_config: true, shuffle: true, num_workers: 2, {SETS}}}"
SEEDS = ["++data.train_ds.seed=42", "++data.train_ds.shard_seed=randomized"]

# Other recipes that people train: the nearest of those above, what is different in it, and what an
# expert says.
JOBS: dict[str, tuple[str, list[str], list[str]]] = {
    "parakeet ctc": ("parakeet", ["~model.joint"], []),
    "parakeet ctc, one GPU": ("parakeet", ["~model.joint", *ONE_GPU], []),
    "parakeet ctc, fine-tuned on plain files": (
        "hybrid",
        ["~model.aux_ctc", "~model.train_ds.shard_seed"],
        [f"NP122 {W}"],
    ),
    "parakeet ctc, fine-tuned, seeded": (
        "hybrid",
        ["~model.aux_ctc", "trainer.num_nodes=1", "trainer.devices=2"],
        [],
    ),
    "parakeet ctc, native, tarred": (
        "cache_aware",
        ["~model.joint", "~model.encoder.att_context_size"],
        [],
    ),
    "parakeet ctc, native, plain": (
        "nest",
        ["model.train_ds.batch_size=32", "model.train_ds.drop_last=false"],
        [],
    ),
    "parakeet ctc, fsdp": ("parakeet", ["~model.joint", FULLY_SHARDED], []),
    "parakeet rnnt, shar": ("parakeet", [f"+{SHAR}"], []),
    "parakeet rnnt, shar, without a limit": (
        "parakeet",
        [f"+{SHAR}", "~trainer.limit_train_batches"],
        [f"NP104 {W}"],
    ),
    "parakeet rnnt, 45 s": ("parakeet", ["model.train_ds.max_duration=45"], []),
    "parakeet rnnt, 50 s": (
        "parakeet",
        ["model.train_ds.max_duration=50"],
        [],
    ),  # 5001 frames, and padding: a note
    "parakeet rnnt, 50 s, no sync": (
        "parakeet",
        [
            "model.train_ds.max_duration=50",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [f"NP102 {E}"],
    ),
    "parakeet rnnt, parts of 2": (
        "parakeet",
        ["model.joint.fused_batch_size=2"],
        [f"NP116 {E}"],
    ),
    "parakeet rnnt, one part": ("parakeet", ["model.joint.fused_batch_size=16"], []),
    "parakeet rnnt, not fused": (
        "parakeet",
        ["model.joint.fuse_loss_wer=false", "model.joint.fused_batch_size=-1"],
        [],
    ),
    "parakeet tdt": (
        "parakeet",
        ["+model.loss={loss_name: tdt, tdt_kwargs: {durations: [0, 1, 2, 3, 4]}}"],
        [],
    ),
    "parakeet tdt, fsdp, 60 s": (
        "parakeet",
        [FULLY_SHARDED, "model.train_ds.max_duration=60"],
        [],
    ),
    "parakeet tdt, sharded, 60 s, no sync": (
        "parakeet",
        [
            f"+{MODEL_PARALLEL}",
            "~trainer.strategy.gradient_as_bucket_view",
            "model.train_ds.max_duration=60",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [],
    ),
    "parakeet tdt, deepspeed, 60 s": (
        "parakeet",
        ["trainer.strategy=deepspeed_stage_2", "model.train_ds.max_duration=60"],
        [],
    ),
    "parakeet tdt, unused parameters, 60 s": (
        "parakeet",
        [
            "trainer.strategy=ddp_find_unused_parameters_true",
            "model.train_ds.max_duration=60",
        ],
        [],
    ),
    "parakeet tdt, all GPUs here": (
        "parakeet",
        ["trainer.devices=-1", "trainer.num_nodes=1", "trainer.strategy=auto"],
        [],
    ),
    "canary, buckets of fixed sizes": (
        "canary",
        [
            "model.train_ds.batch_duration=null",
            "~model.train_ds.quadratic_duration",
            "+model.train_ds.use_bucketing=true",
            "+model.train_ds.bucket_duration_bins=[10,20,40]",
            "+model.train_ds.bucket_batch_size=[48,24,12]",
        ],
        [],
    ),
    "canary, one node": ("canary", ["trainer.num_nodes=1"], []),
    "canary, loaded on the training thread": (
        "canary",
        ["model.train_ds.num_workers=0"],
        [f"NP122 {W}"],
    ),
    "canary, deepspeed": ("canary", ["trainer.strategy=deepspeed_stage_2"], []),
    "canary, fsdp, 60 s, no sync": (
        "canary",
        [
            FULLY_SHARDED,
            "model.train_ds.max_duration=60",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [],
    ),
    "canary, fine-tuned on plain files": (
        "canary",
        [
            "~model.train_ds.tarred_audio_filepaths",
            "model.train_ds.manifest_filepath=train.json",
            "model.train_ds.shard_seed=42",
        ],
        [],
    ),
    "canary, tarred evaluation": (
        "canary",
        [f"+model.validation_ds.tarred_audio_filepaths={SHARDS}"],
        [f"NP108 {E}"],
    ),
    "canary, prompts": (
        "canary",
        ["+model.prompt_format=canary2", "+model.train_ds.prompt_format=canary2"],
        [],
    ),
    "canary, lightning's timeout": (
        "canary",
        [
            "~trainer.strategy",
            (
                "+trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy,"
                " timeout: 600}"
            ),
        ],
        [f"NP119 {W}"],
    ),
    "nest, as published": (
        "nest",
        ["model.train_ds.max_duration=60", "trainer.devices=4", "trainer.num_nodes=1"],
        [],  # nothing but notes of what NVIDIA publishes
    ),
    "nest, frames of 20 ms": (
        "nest",
        ["model.preprocessor.window_stride=0.02", "model.train_ds.max_duration=60"],
        [],
    ),
    "nest, deepspeed": (
        "nest",
        ["trainer.strategy=deepspeed_stage_2", "model.train_ds.max_duration=60"],
        [],
    ),
    "nest, layer norm": ("nest", ["model.encoder.conv_norm_type=layer_norm"], []),
    "nest, on lhotse": (
        "nest",
        [
            "+model.train_ds.use_lhotse=true",
            "+model.train_ds.shard_seed=42",
            LHOTSE_VALIDATION,
            NO_DDP_SAMPLER,
        ],
        [],
    ),
    "nest, on lhotse, with lightning's sampler": (
        "nest",
        [
            "+model.train_ds.use_lhotse=true",
            "+model.train_ds.shard_seed=42",
            LHOTSE_VALIDATION,
        ],
        [f"NP103 {W}"],
    ),
    "nest, native, tarred": (
        "nest",
        [
            "model.train_ds.is_tarred=true",
            f"+model.train_ds.tarred_audio_filepaths={SHARDS}",
            "~model.train_ds.max_duration",
        ],
        [],
    ),
    "nest, native, tarred, on 1,024 ranks": (
        "nest",
        [
            "model.train_ds.is_tarred=true",
            f"+model.train_ds.tarred_audio_filepaths={SHARDS}",
            "~model.train_ds.max_duration",
            "trainer.num_nodes=128",
        ],
        [f"NP106 {W}"],
    ),
    "squeezeformer": (
        "nest",
        [
            "model.encoder._target_=nemo.collections.asr.modules.SqueezeformerEncoder",
            "~model.encoder.conv_norm_type",
        ],
        [],
    ),
    "sortformer, as published": (
        "sortformer",
        ["model.train_ds.session_len_sec=90"],
        [],
    ),
    "sortformer, streaming": ("sortformer", ["+model.streaming_mode=true"], []),
    "sortformer, fsdp": (
        "sortformer",
        [FULLY_SHARDED, "model.train_ds.session_len_sec=90"],
        [],
    ),
    "sortformer, buffers not broadcast": (
        "sortformer",
        [DDP + "broadcast_buffers: false}", "model.train_ds.session_len_sec=90"],
        [],
    ),
    "sortformer, longer positions": (
        "sortformer",
        ["model.encoder.pos_emb_max_len=10000", "model.train_ds.session_len_sec=90"],
        [],
    ),
    "salm, one GPU": ("salm", [*ONE_GPU, "trainer.strategy.data_parallel_size=1"], []),
    "salm, lora": ("salm", ["+model.lora={task_type: CAUSAL_LM, r: 128}"], []),
    "salm, tensor parallel": (
        "salm",
        ["trainer.strategy={tensor_parallel_size:2,data_parallel_size:16}"],
        [],
    ),
    "salm, tensor parallel, too many": (
        "salm",
        ["trainer.strategy.tensor_parallel_size=2"],
        [f"NP132 {W}"],
    ),
    "salm, no size of a batch": (
        "salm",
        ["~data.train_ds.batch_tokens"],
        [f"NP111 {W}"],
    ),
    "parakeet, strategy of another Lightning": (
        "parakeet",
        ["trainer.strategy._target_=pytorch_lightning.strategies.DDPStrategy"],
        [f"NP132 {W}"],
    ),
    "salm, ddp": ("salm", ["~trainer.strategy", "+trainer.strategy=ddp"], []),
    "salm, several sets": ("salm", [f"++{MULTI}", *SEEDS], []),
    "salm, several sets, one plain": (
        "salm",
        [
            f"++{MULTI}",
            *SEEDS,
            "~data.train_ds.st.shar_path",
            "+data.train_ds.st.manifest_filepath=a.json",
        ],
        [f"NP124 {W}"],
    ),
    "cache-aware ctc": ("cache_aware", ["~model.joint"], []),
    "cache-aware hybrid": (
        "cache_aware",
        ["+model.aux_ctc={ctc_loss_weight: 0.3}"],
        [],
    ),
    "cache-aware, six ranks": (
        "cache_aware",
        ["trainer.devices=6", "trainer.num_nodes=1"],
        [],
    ),
    # Lightning's sampler gives all ranks batches of one size, so all have as many parts.
    "cache-aware, larger evaluation batches": (
        "cache_aware",
        ["model.validation_ds.batch_size=32"],
        [],
    ),
    "cache-aware, several latencies": (
        "cache_aware",
        ["model.encoder.att_context_size=[[70,13],[70,1]]"],
        [],
    ),
    "cache-aware, on lhotse": (
        "cache_aware",
        [
            "+model.train_ds.use_lhotse=true",
            "+model.train_ds.shuffle=true",
            LHOTSE_VALIDATION,
            NO_DDP_SAMPLER,
            "+trainer.limit_train_batches=1000",
        ],
        [],
    ),
    "hybrid, fused joint": ("hybrid", [JOINT], [f"NP116 {E}"]),
    "hybrid, buckets": (
        "hybrid",
        ["+model.train_ds.use_bucketing=true", "+model.train_ds.num_buckets=30"],
        [],
    ),
    "hybrid, tarred": (
        "hybrid",
        [
            f"+model.train_ds.tarred_audio_filepaths={SHARDS}",
            "model.train_ds.shard_seed=randomized",
            "+trainer.limit_train_batches=1000",
            "+trainer.val_check_interval=1000",
        ],
        [],
    ),
    "hybrid, tarred, one seed": (
        "hybrid",
        [
            f"+model.train_ds.tarred_audio_filepaths={SHARDS}",
            "+trainer.limit_train_batches=1000",
        ],
        [f"NP122 {W}"],
    ),
    "hybrid, fsdp, 60 s, no sync": (
        "hybrid",
        [
            FULLY_SHARDED,
            "model.train_ds.max_duration=60",
            "+model.encoder.sync_max_audio_length=false",
        ],
        [],
    ),
}
# What the SALM recipe reads, from a file of its own as such recipes have it.
TRAIN = """\
- type: lhotse_as_conversation
  shar_path: ${oc.env:DATA}/asr
- {type: group, input_cfg: more.yaml}
"""
MORE = "- {type: lhotse_as_conversation, shar_path: st}\n"
SOURCES = {
    name: yaml_text.parse(Path(f"{name}.yaml"), text) for name, text in RECIPES.items()
}


@pytest.fixture(autouse=True)
def _in_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "more.yaml").write_text(MORE)
    monkeypatch.chdir(tmp_path)


def said(name: str, overrides: list[str]) -> list[str]:
    config = reading.with_overrides(SOURCES[name], overrides)
    findings = examination.checked(Job(config), examination.chosen())
    return sorted(
        {
            f"{rule.identifier} {finding.severity}"
            for rule, finding in findings
            if finding.severity > Severity.NOTE
        }
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_clean_with_few_notes(name: str) -> None:
    assert said(name, []) == []
    findings = examination.checked(
        Job(reading.with_overrides(SOURCES[name])), examination.chosen()
    )
    assert (
        len([rule for rule, _ in findings if rule.identifier not in OF_NEARLY_ALL]) <= 1
    ), findings


def test_one_changed_key_is_what_an_expert_says() -> None:
    wrong = {
        f"{name} {overrides}": found
        for name, overrides, expected in CASES
        if (found := said(name, overrides)) != expected
    }
    assert wrong == {}


def test_other_recipes_are_what_an_expert_says() -> None:
    assert len(RECIPES) + len(JOBS) >= 60
    wrong = {
        name: found
        for name, (near, changes, said_of_it) in JOBS.items()
        if (found := said(near, changes)) != said_of_it
    }
    assert wrong == {}
