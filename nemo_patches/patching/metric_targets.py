"""NeMo's methods that begin and end an evaluation, and the code that is expected of them."""

from __future__ import annotations

from functools import partial

from nemo_patches.patching.targets import Target, names

_CUDA_GRAPHS_OFF = (
    names("disable_cuda_graphs"),
    names("WithOptionalCudaGraphs disable_cuda_graphs_recursive"),
)
_EPOCH_STARTS = (
    names("maybe_enable_cuda_graphs"),
    names("WithOptionalCudaGraphs enable_cuda_graphs_recursive"),
)
_EPOCH_ENDS = (
    names("disable_cuda_graphs on_validation_epoch_end super"),
    names(
        """
    WithOptionalCudaGraphs disable_cuda_graphs_recursive on_validation_epoch_end super
    """
    ),
)
_TEST_END = names(
    """
    _test_dl_idx clear dict enumerate get get_test_dataloader_prefix isinstance items len
    log_dict multi_test_epoch_end pop test_step_outputs update
    """
)
_of_asr_model = partial(
    Target,
    "nemo.collections.asr.models.asr_model",
    "ASRModel",
    setter="",
    parameters=("self",),
)
# They begin and end an evaluation, or training after an exception.
METRIC_TARGETS = (
    _of_asr_model("on_train_epoch_start", _CUDA_GRAPHS_OFF),
    _of_asr_model("on_validation_epoch_start", _EPOCH_STARTS),
    _of_asr_model("on_test_epoch_start", _EPOCH_STARTS),
    _of_asr_model("on_validation_epoch_end", _EPOCH_ENDS),
    Target(
        module="nemo.core.classes.modelPT",
        owner="ModelPT",
        method="on_test_epoch_end",
        reads=(_TEST_END,),
        setter="",
        parameters=("self",),
    ),
)
# More code that must be as expected: that the numbers which are added up are sums.
METRIC_SUMS = (
    _of_asr_model(
        "multi_validation_epoch_end",
        (names("_compute_bleu bleu mean stack sum torch update"),),
        parameters=("self", "outputs", "dataloader_idx"),
    ),
    Target(
        "nemo.collections.asr.metrics.wer",
        "WER",
        "compute",
        (names("scores words detach float"),),
        setter="",
        parameters=("self",),
    ),
)
