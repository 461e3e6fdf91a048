"""How the length sync gets into NeMo. Every process under auto-apply loads this file: see start_up.py."""

DISABLE_VARIABLE = "NEMO_PATCHES_DISABLE"
# This package imports most targets; when it is complete, one line logs what was patched.
COLLECTION = "nemo.collections.asr"
# Whose trainers may be given a StopTogether.
CALLBACK_CONNECTOR = "lightning.pytorch.trainer.connectors.callback_connector"
# The modules of targets.TARGETS, which must not be imported at start-up; a test compares the two.
TARGET_MODULES = (
    "nemo.collections.asr.modules.conformer_encoder",
    "nemo.collections.asr.modules.squeezeformer_encoder",
    "nemo.collections.asr.modules.transformer_encoder",
    "nemo.collections.asr.modules.conv_asr",
    "nemo.collections.nlp.models.token_classification.punctuation_capitalization_lexical_audio_model",
)
