"""What a NeMo encoder does besides training, with the patch applied and buffers grown: all of it as
in stock.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import nemo_patches

# More rows are read after the subsampling by 8 than there are for 500 frames.
LONGER = 9 * 500
GROWN = 500  # frames; the encoders are built for far fewer


def grown(
    name: str = "conformer", patched: bool = True, **changes: Any
) -> torch.nn.Module:
    """An encoder in evaluation mode whose buffers have grown: privately where patched, in the
    buffers where not.
    """
    if patched:
        nemo_patches.apply()
    torch.manual_seed(0)
    encoder = encoders.makers()[name](**changes).eval()
    with torch.no_grad():
        encoders.run(encoder, GROWN)
    return encoder


def output(encoder: torch.nn.Module, frames: int = GROWN + 300) -> torch.Tensor:
    with torch.no_grad():
        return encoders.run(encoder, frames, seed=3)


def copies(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Stock's cannot be pickled either.
    for name in (name for name in encoders.makers() if name != "transformer"):
        stock = grown(name, patched=False)
        expected, keys = output(stock), list(stock.state_dict())
        encoder = grown(name)
        found[f"{name}: state_dict"] = list(encoder.state_dict()) == keys
        encoder.load_state_dict(stock.state_dict())
        for how, copied in (
            ("deepcopy", copy.deepcopy(encoder)),
            ("pickle", pickle.loads(pickle.dumps(encoder))),
            ("torch.save", saved(encoder)),
        ):
            found[f"{name}: {how}"] = torch.equal(output(copied), expected)
            nemo_patches.revert()
            dist.barrier()
            found[f"{name}: {how}, stock again"] = torch.equal(
                output(copied, GROWN + 900), output(stock, GROWN + 900)
            )
            nemo_patches.apply()
        nemo_patches.revert()
    return found


def saved(encoder: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(encoder, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, torch.nn.Module)
    return loaded


@pytest.mark.one_nemo
@pytest.mark.matrix
def test_state_dict_deepcopy_and_pickle() -> None:
    for result in run_ranks(copies, 2):
        assert all(result.value.values()), [
            what for what, right in result.value.items() if not right
        ]


def pickled_by_one_rank(rank: int, size: int, path: str) -> None:
    encoder = grown()
    expected = output(copy.deepcopy(encoder), LONGER)
    if rank == 0:
        torch.save((encoder, expected), path)


@pytest.mark.one_nemo
def test_a_pickle_of_a_grown_encoder_serves_where_nemo_patches_is_not_installed(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "encoder.pt")
    run_ranks(pickled_by_one_rank, 2, path)
    program = (
        "import sys, torch; sys.modules['nemo_patches'] = None;"
        f" torch.set_num_threads(1)\nencoder, expected = torch.load({path!r},"
        f" weights_only=False)\nsys.path.insert(0, {str(Path(__file__).parent)!r});"
        " import encoders\nwith torch.no_grad(): found = encoders.run(encoder,"
        f" {LONGER}, seed=3)\nassert torch.equal(found, expected) and not"
        " encoders.wrong_rows(encoder)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def exported(rank: int, size: int, folder: str) -> dict[str, Any]:
    found = {}
    for patched in (False, True):
        encoder = grown(patched=patched)
        chance = torch.Generator().manual_seed(7)
        features, lengths = (
            torch.randn(1, encoders.FEATURES, 160, generator=chance),
            torch.tensor([160]),
        )
        traced = torch.jit.trace_module(
            encoder, {"forward_for_export": (features, lengths)}, check_trace=False
        )
        found[f"trace {patched}"] = traced.forward_for_export(features, lengths)[0]
        path = Path(folder, f"{rank}-{patched}.ts")
        encoder.export(str(path))
        loaded = torch.jit.load(str(path))
        found[f"export {patched}"] = loaded(features, lengths)[0]
        torch.compiler.reset()
        compiled = torch.compile(encoder, backend="eager")
        found[f"compile {patched}"] = output(compiled)  # it grows once more
        if patched:
            found["full graph"] = refusal_of_a_full_graph(encoder)
        nemo_patches.revert()
    return found


def refusal_of_a_full_graph(encoder: torch.nn.Module) -> str:
    torch.compiler.reset()
    try:
        output(torch.compile(encoder, backend="eager", fullgraph=True))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.one_nemo
@pytest.mark.matrix
def test_export_trace_and_compile(tmp_path: Path) -> None:
    for result in run_ranks(exported, 2, str(tmp_path), limit=400):
        value = result.value
        assert torch.equal(value["export False"], value["export True"])
        assert torch.equal(value["trace False"], value["trace True"])
        assert torch.equal(value["compile False"], value["compile True"])
        if "reason" in inspect.signature(torch.compiler.disable).parameters:
            assert "compile without fullgraph=True" in value["full graph"]


def compiled_alone(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a process group the patched method must not break the graph where stock's does not."""
    outputs = []
    for patched in (False, True):
        if patched:
            nemo_patches.apply()
        torch.manual_seed(0)
        encoder = encoders.conformer().eval()
        torch.compiler.reset()
        outputs.append(output(torch.compile(encoder, backend="eager"), 100))
        explained = torch._dynamo.explain(encoder)(
            audio_signal=torch.randn(1, encoders.FEATURES, 100),
            length=torch.tensor([100]),
        )
        outputs.append(torch.tensor(explained.graph_break_count))
    nemo_patches.revert()
    return torch.equal(outputs[0], outputs[2]), outputs[1] == outputs[3]


@pytest.mark.one_nemo
@pytest.mark.matrix
def test_compile_without_a_process_group_breaks_no_more_graphs_than_stock() -> None:
    (result,) = run_ranks(compiled_alone, 1, group=False, limit=400)
    assert result.value[0]
    assert result.value[1]


def changed(rank: int, size: int) -> dict[str, Any]:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoderAdapter
    from nemo.collections.common.parts.adapter_modules import LinearAdapterConfig

    found: dict[str, Any] = {}
    for patched in (False, True):
        encoder = grown(patched=patched)
        outputs = [output(encoder)]
        encoder._cfg = _config()
        for model, context in (
            ("rel_pos_local_attn", [8, 8]),
            ("abs_pos", [-1, -1]),
            ("rel_pos", [-1, -1]),
        ):
            torch.manual_seed(1)
            encoder.change_attention_model(model, context)
            encoder.eval()
            outputs += [
                output(encoder, 100),
                output(encoder),
                torch.tensor(encoder.max_audio_length),
            ]
        layout = {
            path: tuple(buffer.shape)
            for path, buffer in encoder.named_buffers()
            if path.endswith("pe")
        }
        found[f"attention {patched}"] = outputs
        found[f"layout {patched}"] = layout
        torch.manual_seed(0)
        adapted = ConformerEncoderAdapter(**encoders.CONFORMER).eval()
        torch.manual_seed(1)
        adapted.add_adapter("one", cfg=LinearAdapterConfig(in_features=16, dim=4))
        adapted.set_enabled_adapters(enabled=True)
        found[f"adapters {patched}"] = [output(adapted, 100), output(adapted)]
        torch.manual_seed(0)
        streaming = encoders.conformer(
            att_context_size=[16, 3],
            att_context_style="chunked_limited",
            conv_context_size="causal",
            causal_downsampling=True,
        ).eval()
        found[f"streaming {patched}"] = stream(streaming)
        nemo_patches.revert()
    return found


def _config() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            **encoders.CONFORMER,
            "dropout": 0.1,
            "dropout_emb": 0.0,
            "dropout_att": 0.0,
            "use_bias": True,
        }
    )


def stream(encoder: Any) -> list[torch.Tensor]:
    encoder.setup_streaming_params()
    channel, in_time, channel_length = encoder.get_initial_cache_state(batch_size=1)
    outputs = []
    for step in range(4):
        features = torch.randn(
            1, encoders.FEATURES, 64, generator=torch.Generator().manual_seed(step)
        )
        with torch.no_grad():
            encoded, _, channel, in_time, channel_length = (
                encoder.cache_aware_stream_step(
                    processed_signal=features,
                    processed_signal_length=torch.tensor([64]),
                    cache_last_channel=channel,
                    cache_last_time=in_time,
                    cache_last_channel_len=channel_length,
                )
            )
        outputs.append(encoded)
    return outputs


@pytest.mark.matrix
def test_change_attention_model_adapters_and_streaming() -> None:
    for result in run_ranks(changed, 2, limit=400):
        value = result.value
        for what in ("attention", "adapters", "streaming"):
            pairs = zip(value[f"{what} False"], value[f"{what} True"], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), what
        for path, shape in value["layout True"].items():
            # The buffer of the new encoding is as it was built.
            assert shape[1] <= 2 * encoders.POSITIONS, path
