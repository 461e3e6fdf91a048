"""How the length sync gets into NeMo. Every process under auto-apply loads this."""

import os
import sys

DISABLE_VARIABLE = "NEMO_PATCHES_DISABLE"
UNSUPPORTED_VARIABLE = "NEMO_PATCHES_UNSUPPORTED"
# This package imports most targets; when it is complete, one line logs what was patched.
COLLECTION = "nemo.collections.asr"
# Lightning's packages, whose trainers are given callbacks; a user of Lightning alone is watched
# from there on, at the latest.
LIGHTNING, OTHER_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
CALLBACK_CONNECTORS = {
    f"{package}.trainer.connectors.callback_connector": package
    for package in (LIGHTNING, OTHER_LIGHTNING)
}
TORCH = "torch"  # whose import begins stall reports in one of several ranks
# The modules of targets.TARGETS, which must not be imported at start-up; a test compares the two.
TARGET_MODULES = (
    "nemo.collections.asr.modules.conformer_encoder",
    "nemo.collections.asr.modules.squeezeformer_encoder",
    "nemo.collections.asr.modules.transformer_encoder",
    "nemo.collections.asr.modules.conv_asr",
    "nemo.collections.nlp.models.token_classification.punctuation_capitalization_lexical_audio_model",
)

# What a launcher of all ranks sets: torchrun, Slurm, Open MPI, MPICH and Intel MPI. Lightning's own
# sets a size without a rank, and nothing at all in rank 0's process, which starts the others: these
# ranks begin with their trainer.
_RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_one_of_several_ranks() -> bool:
    """Whether this process's launcher says so."""
    sizes = (
        os.environ.get(size, "") for rank, size in _RANK_AND_SIZE if rank in os.environ
    )
    return any(size.isdecimal() and int(size) > 1 for size in sizes)


def is_ours(error: Exception) -> bool:
    """Whether it may be swallowed: not where a signal handler of the user's raised it while our
    code ran.
    """
    rank_log = sys.modules.get("nemo_patches.sync.rank_log")
    return rank_log is None or not rank_log.raised_by_signal_handler(error)


def say_error(text: str) -> None:
    """One line on stderr in the form of the log lines (sync/rank_log.py), without logging."""
    variable = os.environ.get
    rank = variable("RANK") or variable("SLURM_PROCID") or "?"
    size = variable("WORLD_SIZE") or variable("SLURM_NTASKS") or "?"
    line = f"nemo_patches ERROR [rank {rank}/{size} {os.uname().nodename}] {text}"
    try:
        from nemo_patches.channel import signals

        with signals.kept_off():
            sys.stderr.write(
                "".join(one if one.isprintable() else "?" for one in line) + "\n"
            )
    except Exception:
        pass  # it cannot be reported anywhere
