"""Traces of real NeMo encoders: what is recorded on two ranks, what the checks find, and that no
number changes.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encoders
import numpy
import pytest
import torch
import torch.distributed as dist
import traces
from ranks import Result, Said, come_in, run_ranks, wait_until
from test_apply import attributes, listening

import nemo_patches

pytestmark = pytest.mark.alone

Trace = list[dict[str, Any]]
TIMEOUT = 3.0  # of rounds that shall come, too, where the machine is busy


@pytest.fixture(autouse=True)
def reverted() -> Iterator[None]:
    yield
    nemo_patches.revert()


def only_trace(folder: Path) -> Trace:
    (file,) = traces.files(folder)
    return traces.records(file)


# In this process: the same numbers, and nothing left behind.


def outcome(
    run: Callable[[], torch.Tensor], module: torch.nn.Module
) -> list[torch.Tensor]:
    """All that a step may change: output, gradients, state, and the random state after it."""
    torch.manual_seed(7)
    with torch.set_grad_enabled(not isinstance(module, encoders_without_backward())):
        output = run()
    if output.requires_grad:
        output.pow(2).mean().backward()
    gradients = [
        weight.grad for weight in module.parameters() if weight.grad is not None
    ]
    return [
        output.detach(),
        *gradients,
        *module.state_dict().values(),
        torch.get_rng_state(),
    ]


def encoders_without_backward() -> tuple[type, ...]:
    return tuple(
        type(encoders.makers()[name]())
        for name in encoders.FORWARD_ONLY
        if name in encoders.makers()
    )


def traced_and_not(
    make: Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor]]], folder: Path
) -> Trace:
    """Assert that a trace changes no bit; what it holds."""
    found = []
    for trace in ("", str(folder)):
        nemo_patches.apply(trace=trace)
        torch.manual_seed(0)
        numpy.random.seed(0)  # the masks of NeMo before 2.5
        random.seed(0)
        module, run = make()
        found.append(outcome(run, module))
    nemo_patches.revert()
    assert len(found[0]) > 5
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return only_trace(folder)


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(encoders.makers()))
def test_every_target_class_is_recorded_and_gives_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    def make() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        encoder = encoders.makers()[name]()
        return encoder, lambda: encoders.run(encoder, 700)

    found = traced_and_not(make, tmp_path)
    # As in stock nothing syncs: there is no group.
    assert traces.kinds(found) == ["header", "enter", "leave", "end"]
    _, enter, leave, _ = found
    assert enter["e"].lower().startswith(name.replace("_", "")[:7])
    assert (enter["shape"], enter["dtype"], enter["device"]) == (
        [2, encoders.FEATURES, 700],
        "float32",
        "cpu",
    )
    assert enter["training"] and leave["shape"][0] == 2
    assert found[0]["versions"]["nemo"] and found[0]["settings"]["sync"] == "bounded"


@pytest.mark.matrix
@pytest.mark.parametrize("masked", ["pre_conv", "post_conv"])
def test_the_masked_token_model_with_and_without_its_pre_encoder(
    masked: str, tmp_path: Path
) -> None:
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from omegaconf import OmegaConf

    from nemo_patches.tools.demo import nest

    config = nest.model(tmp_path, 0)
    del config["train_ds"], config["validation_ds"]
    config["mask_position"] = masked
    if masked == "post_conv":
        config["quantizer"]["combine_time_steps"] = 1
    if encoders.has_flag(encoders.conformer()):
        config["encoder"]["sync_max_audio_length"] = True

    def make() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        model = EncDecDenoiseMaskedTokenPredModel(
            cfg=OmegaConf.create(copy.deepcopy(config))
        )
        assert (model.pre_encoder is not None) == (masked == "post_conv")
        # NeMo's pre_encoder takes features and frames the wrong way round: there must be as many of
        # each.
        audio, length = torch.randn(2, 12_600), torch.tensor([12_600, 9_000])
        signals = {"input_signal": audio, "input_signal_length": length}
        noisy = {"noisy_input_signal": audio * 0.9, "noisy_input_signal_length": length}
        return model, lambda: model.forward(**signals, **noisy, apply_mask=True)[0]

    found = traced_and_not(make, tmp_path / "trace")
    assert traces.kinds(found) == ["header", "enter", "leave", "end"]


def test_nothing_of_a_recorded_call_stays_in_the_model(tmp_path: Path) -> None:
    stock = encoders.conformer()
    nemo_patches.apply(trace=str(tmp_path))
    encoder = encoders.conformer()
    encoders.run(encoder, 50)
    with pytest.raises(ValueError, match="audio_signal"):
        encoder(audio_signal=torch.ones(2, 3, 50), length=torch.tensor([50, 50]))
    with pytest.raises(TypeError, match="kwargs only"):  # NeMo's own refusal
        encoder(torch.ones(2, encoders.FEATURES, 50), torch.tensor([50, 50]))
    for module, untouched in zip(encoder.modules(), stock.modules(), strict=True):
        assert vars(module).keys() == vars(untouched).keys()
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert encoder.state_dict().keys() == stock.state_dict().keys()
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.equal(
            encoders.run(other.eval(), 50), encoders.run(encoder.eval(), 50)
        )
    nemo_patches.revert()
    first, second = traces.of_kind(only_trace(tmp_path), "raised")
    assert (first["type"], first["n"]) == ("ValueError", 2)
    assert (
        "should have shape" in first["message"]
        and "conformer_encoder.py" in first["traceback"]
    )
    assert (second["type"], second["n"]) == ("TypeError", 3)
    names = {one["e"] for one in traces.of_kind(only_trace(tmp_path), "enter")}
    assert names == {"ConformerEncoder", "ConformerEncoder #2", "ConformerEncoder #3"}


def test_forward_is_replaced_only_while_a_trace_is_on(
    tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    nemo_patches.apply()
    before = attributes()
    with listening(caplog):
        nemo_patches.apply(trace=str(tmp_path / "one"))
        assert any(
            name == "forward" for (_, name), _ in attributes().items() ^ before.items()
        )
        encoders.run(encoders.conformer(), 50)
        assert f"trace: {tmp_path / 'one'}/rank-" in str(nemo_patches.status())
        # The same trace goes on.
        nemo_patches.apply(trace=str(tmp_path / "one"), timeout=7)
        encoders.run(encoders.conformer(), 50)
        nemo_patches.apply(trace=tmp_path / "two", timeout=7)
        encoders.run(encoders.conformer(), 50)
        nemo_patches.apply(trace="", timeout=7)
    assert attributes() == before
    changes = [message for message in caplog.messages if "settings changed" in message]
    assert len(changes) == 4 and f"; trace={tmp_path / 'one'} (before: " in changes[0]
    assert [
        len(traces.of_kind(only_trace(tmp_path / name), "leave"))
        for name in ("one", "two")
    ] == [2, 1]
    for name in ("one", "two"):
        assert only_trace(tmp_path / name)[-1]["reason"].startswith(
            "revert(), or apply()"
        )
    nemo_patches.revert()
    nemo_patches.apply(trace="-")
    encoders.run(encoders.conformer(), 50)
    nemo_patches.revert()
    # Begins, is done.
    assert capsys.readouterr().err.count("ConformerEncoder: call 1 ") == 2
    with listening(caplog):
        nemo_patches.apply(trace=tmp_path)
    assert f"sync=bounded, timeout=10 s, trace={tmp_path}" in caplog.messages[0]


def test_ours_inside_somebody_elses_wrapper_does_nothing_after_revert_and_is_recorded_after_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo.collections.asr.modules import ConformerEncoder

    # Restored in the end.
    monkeypatch.setattr(
        ConformerEncoder, "forward", ConformerEncoder.__dict__["forward"]
    )
    nemo_patches.apply(trace=tmp_path / "one")
    ours = ConformerEncoder.forward
    ConformerEncoder.forward = lambda self, **inputs: ours(self, **inputs)
    encoder = encoders.conformer()
    encoders.run(encoder, 50)
    nemo_patches.revert()
    encoders.run(encoder, 50)
    nemo_patches.apply(trace=tmp_path / "two")
    encoders.run(encoder, 50)
    nemo_patches.revert()
    encoders.run(encoder, 50)
    assert [
        len(traces.of_kind(only_trace(tmp_path / name), "leave"))
        for name in ("one", "two")
    ] == [1, 1]


def test_data_parallels_replicas_end_the_trace_and_it_is_said_once(
    tmp_path: Path, caplog: Any
) -> None:
    nemo_patches.apply(trace=tmp_path)
    encoder = encoders.conformer()
    encoders.run(encoder, 50)
    with listening(caplog):
        for _ in range(2):  # for each call a new module, on each device
            encoders.run(encoder._replicate_for_data_parallel(), 50)
    (message,) = caplog.messages
    assert "nn.DataParallel's replicas are not recorded" in message
    assert "nn.DataParallel" in nemo_patches.status().trace_file
    assert traces.kinds(only_trace(tmp_path))[-2:] == ["leave", "end"]


class CallsItsParent:
    """Put before a ConformerEncoder."""

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> Any:
        return super().forward(audio_signal=audio_signal, length=length)  # type: ignore[misc]


def test_a_subclass_that_calls_its_parents_forward_makes_one_call(
    tmp_path: Path,
) -> None:
    from nemo.collections.asr.modules import ConformerEncoder

    nemo_patches.apply(trace=tmp_path)
    encoders.run(
        type("Own", (CallsItsParent, ConformerEncoder), {})(**encoders.CONFORMER), 50
    )
    nemo_patches.revert()
    found = only_trace(tmp_path)
    assert (
        len(traces.of_kind(found, "enter")) == len(traces.of_kind(found, "leave")) == 1
    )
    assert found[1]["e"] == "Own"


class Inside(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.encoder(audio_signal=audio_signal, length=length)[0] * 2


@pytest.mark.one_nemo
def test_a_compiled_encoder_is_compiled_as_without_a_trace_and_that_is_said_once(
    tmp_path: Path, caplog: Any
) -> None:
    def graphs() -> list[tuple[int, int]]:
        found = []
        # NeMo's type checks cannot be compiled inside another module, with or without us;
        # ConvASREncoder's can.
        for make in (encoders.conformer, lambda: Inside(encoders.conv_asr())):
            torch._dynamo.reset()
            torch.manual_seed(0)
            module = make().eval()
            inputs = {
                "audio_signal": torch.ones(2, encoders.FEATURES, 80),
                "length": torch.tensor([80, 80]),
            }
            with torch.no_grad():
                explained = torch._dynamo.explain(module)(**inputs)
            found.append((explained.graph_count, explained.graph_break_count))
        return found

    nemo_patches.apply(trace="")
    without = graphs()
    with listening(caplog):
        nemo_patches.apply(trace=tmp_path)
        assert graphs() == without
    assert sum("is not recorded" in message for message in caplog.messages) == 1
    assert traces.files(tmp_path) == []


# On two ranks.


def train(rank: int, size: int, folder: str) -> None:
    said = Said()
    nemo_patches.apply(trace=folder, timeout=TIMEOUT)
    torch.manual_seed(0)
    encoder = encoders.conformer()
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    for step in range(3):  # calls 1 to 3, of which 2 grows
        encoders.run(model, (50, 900 + 100 * rank, 60)[step]).pow(2).mean().backward()
    assert not model._forward_pre_hooks
    dist.barrier()
    if rank == 1:
        wait_until(lambda: recorded(folder, 0, '"outcome":"timeout"'))
    encoders.run(encoder, 100)  # call 4: rank 0 gives up
    if rank == 0:
        wait_until(lambda: any("Missing: rank 1" in line for line in said.lines))
    come_in(encoder)
    encoder.eval()
    if rank == 0:
        with torch.no_grad():
            for _ in range(2):  # calls 5 and 6, alone
                encoders.run(encoder, 70)
    encoder.train()
    dist.barrier()

    flagged = encoders.conformer(
        **({"sync_max_audio_length": False} if encoders.has_flag(encoder) else {})
    )
    encoders.run(flagged, 50)
    other = encoders.conformer()
    nemo_patches.apply(sync="local", trace=folder, timeout=TIMEOUT)
    encoders.run(other, 50)
    nemo_patches.apply(trace=folder, timeout=TIMEOUT)
    own = type("Own", (type(encoder),), {"forward": without_its_parent})(
        **encoders.CONFORMER
    )
    encoders.run(own, 50)
    last = encoders.conformer(n_layers=2)
    encoders.run(last, 50)
    dist.barrier()
    if rank == 1:
        # What a killed rank has enqueued at last is lost.
        wait_until(lambda: recorded(folder, 1, '"e":"Own"'))
        os._exit(0)  # killed, as far as anybody can see
    wait_until(
        lambda: (
            encoders.run(last, 50) is not None
            and any("has ended" in line for line in said.lines)
        )
    )
    wait_until(lambda: any("gone: rank 1" in line for line in said.lines))


def recorded(folder: str, rank: int, text: str) -> bool:
    files = Path(folder).glob(f"rank-{rank:05}.*")
    return any(text in file.read_text() for file in files)


def without_its_parent(
    self: Any, audio_signal: torch.Tensor, length: torch.Tensor
) -> Any:
    self.update_max_seq_length(
        seq_length=audio_signal.size(2), device=audio_signal.device
    )
    return self.forward_internal(audio_signal, length)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """The trace of each rank."""
    folder = tmp_path_factory.mktemp("trace")
    results = run_ranks(train, 2, str(folder), dies=(1,))
    for result in results:
        assert "tracing has ended" not in result.stderr
    return [traces.records(file, cut=True) for file in traces.files(folder)]


FIRST = "ConformerEncoder"


@pytest.mark.one_nemo
def test_the_header_tells_whose_file_it_is(trained: list[Trace]) -> None:
    for rank, trace in enumerate(trained):
        header = trace[0]
        assert (header["k"], header["rank"], header["world_size"]) == (
            "header",
            rank,
            2,
        )
        assert (
            header["settings"]["timeout"] == f"{TIMEOUT:g}"
            and header["versions"]["torch"] == torch.__version__
        )


@pytest.mark.one_nemo
def test_a_healthy_call_is_recorded_in_order(trained: list[Trace]) -> None:
    for trace in trained:
        call = [one for one in trace if one.get("e") == FIRST and one.get("n") == 3]
        assert traces.kinds(call) == ["enter", "sync", "leave"]
        enter, sync, leave = call
        assert (sync["outcome"], sync["round"], sync["local"], sync["result"]) == (
            "came",
            3,
            60,
            60,
        )
        assert 0 < sync["waited"] <= leave["t"] - enter["t"] and leave["shape"][0] == 2
        assert enter["training"]
        # The stall monitor's records may come a moment later than their time says.
        times = [one["t"] for one in trace[1:] if one["k"] != "stalled"]
        assert times == sorted(times)


@pytest.mark.one_nemo
def test_growth(trained: list[Trace]) -> None:
    for trace in trained:
        (grow,) = traces.of_kind(trace, "grow", e=FIRST)
        assert (grow["n"], grow["old"], grow["new"]) == (2, encoders.POSITIONS, 1000)


@pytest.mark.one_nemo
def test_a_timeout_and_who_was_missing(trained: list[Trace]) -> None:
    first, second = trained
    (sync,) = traces.of_kind(first, "sync", e=FIRST, n=4)
    assert sync["outcome"] == "timeout" and sync["waited"] > 0.9 * TIMEOUT
    missing = traces.of_kind(first, "stalled", e=FIRST, n=4)[0]
    assert missing["ranks"] == [1]
    assert missing["kinds"][0] in ("elsewhere", "late")
    assert traces.of_kind(second, "sync", e=FIRST, n=4)[0]["outcome"] == "came"


@pytest.mark.one_nemo
def test_uneven_calls(trained: list[Trace]) -> None:
    first, second = trained
    alone = [traces.of_kind(first, "sync", e=FIRST, n=n)[0]["outcome"] for n in (5, 6)]
    assert alone == ["timeout", "unwaited"]
    assert [one["training"] for one in traces.of_kind(first, "enter", e=FIRST)][4:] == [
        False,
        False,
    ]
    assert len(traces.of_kind(second, "enter", e=FIRST)) == 4


@pytest.mark.one_nemo
def test_a_rank_that_does_not_sync(trained: list[Trace]) -> None:
    for trace in trained:
        outcomes = [
            traces.of_kind(trace, "sync", e=f"{FIRST} #{e}")[0]["outcome"]
            for e in (2, 3)
        ]
        has_flag = encoders.has_flag(encoders.conformer())
        assert outcomes == ["local" if has_flag else "came", "local"]


@pytest.mark.one_nemo
def test_of_a_class_whose_forward_does_not_call_its_parents_only_the_sync_is_recorded(
    trained: list[Trace],
) -> None:
    for trace in trained:
        (sync,) = [one for one in trace if one.get("e") == "Own"]
        assert (sync["k"], sync["n"]) == ("sync", 1)


@pytest.mark.one_nemo
def test_a_rank_that_has_gone(trained: list[Trace]) -> None:
    first, second = trained
    assert traces.of_kind(first, "sync", e=f"{FIRST} #4")[-1]["outcome"] == "ended"
    gone = [one for one in traces.of_kind(first, "stalled", n=0) if one["e"]]
    assert gone[0]["ranks"] == [1]
    assert first[-1]["k"] == "end" and second[-1]["k"] != "end"


def check(rank: int, size: int, folder: str) -> list[str]:
    """The errors that reached the caller."""
    said = Said()
    nemo_patches.apply(
        trace=folder, trace_checks="inputs,barrier,cuda", timeout=TIMEOUT
    )
    encoder = encoders.conformer()
    nan = torch.full((2, encoders.FEATURES, 80), torch.nan)
    finite, lengths = torch.ones_like(nan), torch.tensor([80, 80])
    waited_for = Path(folder).with_suffix(".waited")
    raised = []

    def call(signal: torch.Tensor = finite, length: torch.Tensor = lengths) -> None:
        try:
            encoder(audio_signal=signal, length=length)
        except Exception as error:
            raised.append(type(error).__name__)
        dist.barrier()

    call()
    for _ in range(12):  # calls 2 to 13
        call(nan if rank == 1 else finite)
    call(finite / 0)
    call(length=torch.tensor([80, 81]))
    call(length=torch.tensor([80, 80, 80]))
    call(finite.double())
    if rank == 1:
        wait_until(waited_for.exists)
    else:
        finding = "call 18: check barrier: "
        saying = threading.Thread(
            target=lambda: (
                wait_until(lambda: any(finding in line for line in said.lines)),
                waited_for.touch(),
            )
        )
        saying.start()
    call()  # call 18
    return raised


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(check, 2, str(tmp_path_factory.mktemp("checks") / "checks"))


@pytest.mark.one_nemo
def test_what_is_found_is_said_the_first_and_the_tenth_time(
    checked: list[Result],
) -> None:
    first, second = (
        [line.partition("ConformerEncoder: ")[2] for line in one.lines("check inputs")]
        for one in checked
    )
    nan = (
        f"the signal has {2 * encoders.FEATURES * 80} NaN and 0 Inf among {2560} values"
    )
    common = [
        "call 14: check inputs: the signal has 0 NaN and 2560 Inf among 2560 values",
        (
            "call 15: check inputs: the longest length is 81, beyond the signal's 80"
            " frames"
        ),
        "call 16: check inputs: a batch of 2, but lengths of shape [3]",
        (
            "call 17: check inputs: the signal is torch.float64, the weights are"
            " torch.float32, without autocast"
        ),
    ]
    assert second[:2] == [
        f"call 2: check inputs: {nan}",
        f"call 11: check inputs: {nan} (found 10 times)",
    ]
    assert first == second[2:] == common
    assert len(checked[1].lines("check cuda: does nothing")) == 1


@pytest.mark.one_nemo
def test_the_barrier_names_who_does_not_come(checked: list[Result]) -> None:
    first, second = checked
    (finding,) = first.lines("check barrier")
    text = (
        "not every rank came to this call in time; who is missing, a stall report says"
    )
    assert f"ConformerEncoder: call 18: check barrier: {text}" in finding
    assert first.lines(
        "ConformerEncoder, barrier: training call",
        "not every rank came within",
        "Missing: rank 1",
    )
    assert second.lines("check barrier") == []


@pytest.mark.one_nemo
def test_a_finding_raises_nothing(checked: list[Result]) -> None:
    """What NeMo itself raises is raised: for lengths of another batch, and for a signal of another
    dtype.
    """
    for result in checked:
        assert "LengthSyncTimeout" not in result.value
        assert len(result.value) <= 2
