"""Buffers that grow to different lengths on different ranks under DDP: no row wrong, BatchNorm
right.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import Said, run_ranks

import nemo_patches

LONG, SHORT = 400, 50


class Nested(torch.nn.Module):
    """An encoder two levels down, with BatchNorm buffers before and behind it in DDP's flat
    broadcast.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.before = torch.nn.BatchNorm1d(encoders.FEATURES)
        self.model = torch.nn.Module()
        self.model.encoder = encoder
        self.after = torch.nn.BatchNorm1d(16)

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> Any:
        encoded, _ = self.model.encoder(
            audio_signal=self.before(audio_signal), length=length
        )
        return (self.after(encoded),)


def lightning_module(encoder: torch.nn.Module) -> torch.nn.Module:
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested(encoder)

        def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> Any:
            return self.nested(audio_signal, length)

    return Module()


def is_private(module: Any) -> bool:
    """Whether it reads a table that is not the buffer that DDP and a checkpoint see."""
    names = ("pe", "seq_range", "cos", "sin")
    return any(
        getattr(module, name, None) is not module._buffers.get(name) for name in names
    )


WRAPS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "bare": lambda encoder: encoder,
    "nested": Nested,
    "lightning": lightning_module,
}


def train_unevenly(
    name: str, wrap: str, long_rank: int, rank: int, apply_late: bool, stock_rank: int
) -> Any:
    """A few DDP steps in which one rank's input is long: from the first on where the encoder starts
    at length 0.
    """
    if not apply_late and rank != stock_rank:
        nemo_patches.apply(sync="local")
    torch.manual_seed(0)
    encoder = encoders.makers()[name]()
    if encoders.has_flag(encoder):
        encoder.sync_max_audio_length = False
    whole = WRAPS[wrap](encoder)
    model = torch.nn.parallel.DistributedDataParallel(whole)
    if apply_late and rank != stock_rank:
        nemo_patches.apply(sync="local")
    collected = {path: tuple(buffer.shape) for path, buffer in whole.named_buffers()}
    for step in range(4):
        frames = LONG if rank == long_rank and step in (0, 2) else SHORT
        encoders.run(model, frames, seed=step * 10 + rank).pow(2).mean().backward()
    # DDP broadcasts rank 0's buffers, then every rank sees the same input: the BatchNorms must
    # agree to the bit.
    torch.manual_seed(99)
    encoders.run(model, SHORT, seed=99).pow(2).mean().backward()
    wrong = encoders.wrong_rows(encoder)
    norms = [
        buffer.clone()
        for path, buffer in whole.named_buffers()
        if "running" in path or "batches" in path
    ]
    layout = {path: tuple(buffer.shape) for path, buffer in whole.named_buffers()}
    nemo_patches.revert()
    return wrong, layout == collected, norms


def uneven_growth(rank: int, size: int, cases: list[tuple[Any, ...]]) -> list[Any]:
    found = []
    for name, wrap, long_rank, apply_late, stock_rank in cases:
        found.append(
            train_unevenly(name, wrap, long_rank, rank, apply_late, stock_rank)
        )
        dist.barrier()
    return found


def cases() -> list[tuple[Any, ...]]:
    """(encoder, wrap, rank with the long input, apply after DDP wrapped the model, rank that stays
    stock or -1).
    """
    names = [name for name in encoders.makers() if name not in encoders.FORWARD_ONLY]
    table: list[tuple[Any, ...]] = []
    for name in names:
        for long_rank in (0, 1):
            table += [
                (name, "bare", long_rank, False, -1),
                (name, "nested", long_rank, True, -1),
            ]
    table += [
        ("conformer", "lightning", 1, False, -1),
        ("conformer", "lightning", 0, True, -1),
    ]
    if encoders.has_flag(encoders.conformer()):
        # A rank of stock, with its flag off, beside a patched rank that grows.
        table += [
            ("conformer", "nested", 0, False, 1),
            ("conformer", "nested", 1, True, 0),
        ]
    return table


@pytest.mark.matrix
def test_no_row_is_wrong_whichever_rank_was_longer() -> None:
    results = run_ranks(uneven_growth, 2, cases())
    for case, first, second in zip(
        cases(), results[0].value, results[1].value, strict=True
    ):
        for wrong, same_layout, _ in (first, second):
            assert wrong == 0, case
            assert same_layout, case
        assert first[2], case
        assert all(
            torch.equal(one, other)
            for one, other in zip(first[2], second[2], strict=True)
        ), case


def stock_corrupts(rank: int, size: int) -> int:
    encoder = encoders.conformer(sync_max_audio_length=False)
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    for step in range(3):
        encoders.run(
            model, LONG if rank == 1 and step == 1 else SHORT
        ).mean().backward()
    return encoders.wrong_rows(encoder)


def plain_attribute_beside_stock(rank: int, size: int) -> list[torch.Tensor]:
    """Rank 0's table is no buffer, as with patches/upstream; rank 1 is stock. No table grows, both
    read the same.
    """
    encoder: Any = encoders.conformer(sync_max_audio_length=False)
    if rank == 0:
        table = encoder.pos_enc.pe
        del encoder.pos_enc.pe
        encoder.pos_enc.pe = table
    whole = Nested(encoder)
    model = torch.nn.parallel.DistributedDataParallel(whole)
    for step in range(3):
        encoders.run(model, SHORT, seed=step).mean().backward()
    return [buffer for path, buffer in whole.named_buffers() if "running" in path]


def both_corrupt(rank: int, size: int) -> tuple[int, list[torch.Tensor]]:
    return stock_corrupts(rank, size), plain_attribute_beside_stock(rank, size)


def test_stock_does_corrupt_in_this_very_setting() -> None:
    """And so would, beside a rank of stock, a table that is no buffer: why the runtime is not as
    patches/upstream.
    """
    first, second = run_ranks(both_corrupt, 2)
    assert second.value[0] > 100
    assert any(
        not torch.allclose(one, other)
        for one, other in zip(first.value[1], second.value[1], strict=True)
    )


def each_table(
    change: Callable[[Any, str, torch.Tensor], object],
) -> Callable[[torch.nn.Module], None]:
    """Done to every module with a table alone: the module, the table's name, the table."""

    def change_all(model: torch.nn.Module) -> None:
        for module in model.modules():
            for name in ("pe", "seq_range"):
                if isinstance(table := getattr(module, name, None), torch.Tensor):
                    with contextlib.suppress(TypeError):  # of "no tensor"
                        change(module, name, table)

    return change_all


def persistent(model: Any) -> None:
    """The tables go through a state dict, after one more growth."""
    each_table(lambda module, name, table: module.register_buffer(name, table))(model)
    encoders.sync(model.model.encoder, 3 * LONG)
    model.load_state_dict(
        {path: 2 * tensor for path, tensor in model.state_dict().items()}
    )


MOVES: dict[str, Callable[[torch.nn.Module], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.float64),
    "there and back": lambda model: model.half().float(),
    "whole model to meta": lambda model: model.to("meta"),
    "alone half": each_table(lambda module, name, table: module.half()),
    "alone to": each_table(lambda module, name, table: module.to(torch.float64)),
    "alone to meta": each_table(
        lambda module, name, table: module.to_empty(device="meta", recurse=False)
    ),
    "shared": each_table(lambda module, name, table: module.share_memory()),
    "applied": lambda model: model.apply(lambda module: module.double()),
    "longer": each_table(
        lambda module, name, table: setattr(
            module, name, table.repeat_interleave(2, table.dim() // 2)
        )
    ),
    "shorter": each_table(
        lambda module, name, table: setattr(
            module, name, table.narrow(table.dim() // 2, 0, 7)
        )
    ),
    "no tensor": each_table(
        lambda module, name, table: setattr(module, name, "no tensor")
    ),
    "deleted": each_table(lambda module, name, table: delattr(module, name)),
    "registered": each_table(
        lambda module, name, table: module.register_buffer(name=name, tensor=3 * table)
    ),
    "persistent": persistent,
}


def moved(name: str, move: str) -> dict[str, torch.Tensor]:
    """What the forward reads after a growth, a change of the model, and one more growth (none on
    meta).
    """
    torch.manual_seed(0)
    encoder = encoders.makers()[name]().eval()
    whole = Nested(encoder)
    with torch.no_grad():
        encoders.run(encoder, LONG)
    MOVES[move](whole)
    found = {
        f"moved {path}": tensor.clone()
        for path, tensor in encoders.length_sized(encoder).items()
    }
    found |= {
        f"shared {path}": torch.tensor(t.is_shared())
        for path, t in encoders.length_sized(encoder).items()
    }
    found |= {
        f"state {path}": tensor.clone() for path, tensor in whole.state_dict().items()
    }
    if not move.endswith("meta"):
        encoders.sync(encoder, 10 * LONG)
        found |= encoders.length_sized(encoder)
    return found


def moves(rank: int, size: int) -> list[str]:
    cases = [(name, move) for name in encoders.makers() for move in MOVES]
    stock = {case: moved(*case) for case in cases}
    nemo_patches.apply()
    patched = {case: moved(*case) for case in cases}
    nemo_patches.revert()
    problems = []
    for case in cases:
        for path in stock[case].keys() | patched[case].keys():
            tensor, other = stock[case].get(path), patched[case].get(path)
            if tensor is None or other is None:
                problems.append(f"{case}: {path} is in one of them only")
                continue
            alike = (
                tensor.dtype == other.dtype
                and tensor.device == other.device
                and tensor.shape == other.shape
            )
            if not alike or not (tensor.is_meta or torch.equal(tensor, other)):
                problems.append(f"{case}: {path}")
    return problems


@pytest.mark.matrix
def test_grown_tensors_follow_the_model_as_in_stock() -> None:
    for result in run_ranks(moves, 2):
        assert result.value == []


def revert_midway(rank: int, size: int) -> dict[str, Any]:
    """Three steps patched, revert(), three steps of stock; all of it stock for comparison."""
    found = {}
    for name in (n for n in encoders.makers() if n not in encoders.FORWARD_ONLY):
        runs = []
        for patched in (False, True):
            torch.manual_seed(0)
            encoder = encoders.makers()[name]()
            model = torch.nn.parallel.DistributedDataParallel(encoder)
            torch.manual_seed(1)
            if patched:
                nemo_patches.apply()
            outputs = []
            for step in range(6):
                if step == 3:
                    nemo_patches.revert()
                outputs.append(encoders.run(model, LONG + 100 * step, seed=rank))
                outputs[-1].mean().backward()
            registered = {
                path: tuple(buffer.shape) for path, buffer in encoder.named_buffers()
            }
            private = [
                path for path, module in encoder.named_modules() if is_private(module)
            ]
            private += [
                path
                for path, module in encoder.named_modules()
                if {"pe", "seq_range"} & set(dir(type(module)))
            ]
            runs.append((outputs, registered, private, encoder.max_audio_length))
        stock, patched_run = runs
        same = all(
            torch.equal(a, b) for a, b in zip(stock[0], patched_run[0], strict=True)
        )
        found[name] = (same, stock[1:] == patched_run[1:])
    return found


def test_revert_in_the_middle_of_training_leaves_a_model_that_stock_continues() -> None:
    for result in run_ranks(revert_midway, 2):
        assert all(value == (True, True) for value in result.value.values()), (
            result.value
        )


@pytest.mark.parametrize("name", ["conformer"])
def test_growth_without_a_process_group_is_stocks(name: str) -> None:
    nemo_patches.apply()
    try:
        encoder = encoders.makers()[name]()
        encoders.run(encoder, LONG)
        assert encoder.pos_enc._buffers["pe"].size(1) == 2 * LONG - 1
        assert not is_private(encoder.pos_enc)
    finally:
        nemo_patches.revert()


def hidden_group(rank: int, size: int) -> list[tuple[str, int]]:
    """Some NeMo code hides the process group for a while; what is private must go on growing
    privately.
    """
    from unittest import mock

    nemo_patches.apply(sync="local")
    wrong = []
    for name, make in encoders.makers().items():
        encoder = make().eval()
        for frames, hidden in (
            (LONG, False),
            (5 * LONG, True),
            (12 * LONG, False),
            (30 * LONG, True),
        ):
            hide = (
                mock.patch("torch.distributed.is_initialized", lambda: False)
                if hidden
                else contextlib.nullcontext()
            )
            with hide, torch.no_grad():
                encoder(
                    audio_signal=torch.randn(1, encoders.FEATURES, frames),
                    length=torch.tensor([frames]),
                )
            wrong.append((f"{name} at {frames}", encoders.wrong_rows(encoder)))
    return wrong


def test_a_process_group_that_is_hidden_for_a_while() -> None:
    for result in run_ranks(hidden_group, 2):
        assert [where for where, wrong in result.value if wrong] == []


class Exported(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> Any:
        return self.encoder(audio_signal=audio_signal, length=length)[0]


def exported(rank: int, size: int) -> list[str]:
    """Rank 0 alone exports, with the process group and while it is hidden, before and after growth."""
    from unittest import mock

    nemo_patches.apply(timeout=30)
    encoder: Any = encoders.conformer().eval()
    strict_too = hasattr(torch.compiler, "is_exporting")
    wrong = []
    for frames in (SHORT, 5 * LONG):
        with torch.no_grad():
            encoders.run(encoder, frames)
        assert is_private(encoder.pos_enc) == (frames > SHORT)
        rounds = nemo_patches.status().encoders[-1].rounds
        for hidden, strict in itertools.product(
            (False, True), (False, True)[: 1 + strict_too] if rank == 0 else ()
        ):
            without_group = mock.patch("torch.distributed.is_initialized", bool)
            inputs = (
                torch.randn(1, encoders.FEATURES, frames // 2),
                torch.tensor([frames // 2]),
            )
            tables, buffers = tables_and_buffers(encoder)
            with without_group if hidden else contextlib.nullcontext(), torch.no_grad():
                found = torch.export.export(
                    Exported(encoder), inputs, strict=strict
                ).module()(*inputs)
            with without_group, torch.no_grad():
                expected = same_weights(encoder)(
                    audio_signal=inputs[0], length=inputs[1]
                )[0]
            after = tables_and_buffers(encoder)
            same = torch.equal(found, expected) and all(
                before.keys() == now.keys()
                and all(tensor is now[path] for path, tensor in before.items())
                for before, now in zip((tables, buffers), after, strict=True)
            )
            wrong += (
                [] if same else [f"{frames} frames, hidden {hidden}, strict {strict}"]
            )
        if nemo_patches.status().encoders[-1].rounds != rounds:
            wrong.append(f"{frames} frames: a round")
    return wrong


def tables_and_buffers(
    encoder: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return encoders.length_sized(encoder), dict(encoder.named_buffers())


def same_weights(encoder: torch.nn.Module) -> Any:
    """Another encoder, with a table of its own."""
    other: Any = encoders.conformer().eval()
    other.load_state_dict(encoder.state_dict())
    return other


@pytest.mark.one_nemo
@pytest.mark.matrix
def test_torch_export_takes_an_encoder_that_has_grown_and_leaves_it_whole() -> None:
    for result in run_ranks(exported, 2):
        assert result.value == []


def trainable() -> dict[str, Callable[[], torch.nn.Module]]:
    """Every encoder that has a backward on CPU; the Conformer with each kind of positions, and no
    dropout of these.
    """
    found: dict[str, Callable[[], torch.nn.Module]] = {
        name: make
        for name, make in encoders.makers().items()
        if name not in encoders.FORWARD_ONLY
    }
    for attention in ("rel_pos", "rel_pos_local_attn", "abs_pos"):
        settings = {
            "self_attention_model": attention,
            "att_context_size": [8, 8],
            "dropout_emb": 0.0,
            "dropout": 0.0,
        }
        found[f"conformer {attention}"] = functools.partial(
            encoders.conformer, **settings
        )
    return found


def grown_under(
    mode: Callable[[], Any], make: Callable[[], torch.nn.Module], ddp: bool
) -> dict[str, torch.Tensor]:
    """A validation of longer input than ever, as Lightning's with torch.inference_mode(), then
    training; all of it.
    """
    torch.manual_seed(0)
    encoder: Any = make().eval()
    if getattr(encoder, "self_attention_model", "") == "rel_pos_local_attn":
        # NeMo keeps this attention's masks as the first call has made them, and they never grow
        with torch.no_grad():
            encoders.run(encoder, SHORT)
    with mode():
        validated = encoders.run(encoder, LONG).clone()
    found = {
        "validated": validated,
        **{f"grown {path}": t for path, t in encoders.length_sized(encoder).items()},
    }
    model = torch.nn.parallel.DistributedDataParallel(encoder) if ddp else encoder
    torch.manual_seed(1)
    for step in range(3):
        encoder.eval()
        with mode():
            encoders.run(encoder, LONG + 300 * step)
        model.train()
        found[f"trained {step}"] = encoders.run(
            model, LONG if step == 2 else SHORT, seed=step
        )
        found[f"trained {step}"].pow(2).mean().backward()
    found |= {
        f"gradient {path}": p.grad
        for path, p in encoder.named_parameters()
        if p.grad is not None
    }
    found |= {f"state {path}": tensor for path, tensor in encoder.state_dict().items()}
    tables = encoders.length_sized(encoder).values()
    assert tables and not any(
        table.is_inference() or table.requires_grad for table in tables
    )
    return {path: tensor.detach().clone() for path, tensor in found.items()}


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


MODES: dict[
    str, tuple[Callable[[], Any], Callable[[], Any]]
] = {  # and what it is to be equal to
    "inference_mode": (torch.inference_mode, contextlib.nullcontext),
    "no_grad in inference_mode": (
        lambda: stacked(torch.inference_mode(), torch.no_grad()),
        contextlib.nullcontext,
    ),
    "inference_mode in no_grad": (
        lambda: stacked(torch.no_grad(), torch.inference_mode()),
        contextlib.nullcontext,
    ),
    "no_grad": (torch.no_grad, contextlib.nullcontext),
    "autocast": (lambda: stacked(torch.inference_mode(), autocast()), autocast),
}


@contextlib.contextmanager
def stacked(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def grown_in_inference_mode(rank: int, size: int) -> list[str]:
    nemo_patches.apply()
    wrong = []
    for name, make in trainable().items():
        for mode, contexts in MODES.items():
            found, expected = (
                grown_under(context, make, ddp=size > 1) for context in contexts
            )
            assert found.keys() == expected.keys()
            wrong += [
                f"{name}, {mode}: {path}"
                for path in expected
                if not torch.equal(found[path], expected[path])
            ]
    return wrong


@pytest.mark.one_nemo
@pytest.mark.matrix
@pytest.mark.parametrize("size", [1, 2])
def test_what_has_grown_in_inference_mode_is_trained_with_to_the_last_bit(
    size: int,
) -> None:
    for result in run_ranks(grown_in_inference_mode, size, group=size > 1):
        assert result.value == []


def tables_made_in_inference_mode(rank: int, size: int) -> list[str]:
    """By whatever comes to an encoder's tables; with a process group and without one."""
    nemo_patches.apply()
    makers = {**encoders.makers()}
    if importlib.util.find_spec("nemo.collections.nlp"):
        makers["punctuation"] = encoders.punctuation
    wrong = []

    def look(
        what: str, encoder: torch.nn.Module, dtype: torch.dtype = torch.float32
    ) -> None:
        for path, table in encoders.length_sized(encoder).items():
            if (
                table.is_inference()
                or table.requires_grad
                or table.dtype not in (dtype, torch.int64)
            ):
                wrong.append(
                    f"{what}: {path}: {table.is_inference()}, {table.requires_grad},"
                    f" {table.dtype}"
                )

    for name, make in makers.items():
        encoder: Any = make()
        with torch.inference_mode():
            encoders.sync(encoder, LONG)
            assert not torch.is_grad_enabled() and torch.is_inference_mode_enabled()
        look(f"{name} grown", encoder)
        if hasattr(encoder, "set_max_audio_length"):
            with torch.inference_mode():
                encoder.set_max_audio_length(2 * LONG)
            look(f"{name} set", encoder)
            with torch.inference_mode():
                look(f"{name} built", make())
        # What is private follows the model; the buffers of others are stock's.
        if size > 1:
            with torch.inference_mode():
                encoder.half()
            look(f"{name} half", encoder, torch.float16)
            encoder.float()
            look(f"{name} float", encoder)
        copied = copy.deepcopy(encoder)
        with torch.inference_mode():
            encoders.sync(copied, 30 * LONG)
        look(f"{name} copied", copied)
    encoder = encoders.conformer()
    from omegaconf import OmegaConf

    rest = {"dropout": 0.1, "dropout_emb": 0.0, "dropout_att": 0.0, "use_bias": True}
    encoder._cfg = OmegaConf.create({**encoders.CONFORMER, **rest})
    with torch.inference_mode():
        encoder.change_attention_model("abs_pos")
    look("another attention", encoder)
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_no_table_is_an_inference_tensor_whoever_makes_it(size: int) -> None:
    for result in run_ranks(tables_made_in_inference_mode, size, group=size > 1):
        assert result.value == []


def after_revert(rank: int, size: int) -> bool:
    nemo_patches.apply()
    encoder: Any = encoders.conformer()
    update = encoder.update_max_seq_length  # ours, kept by somebody
    nemo_patches.revert()
    with torch.inference_mode():
        update(seq_length=LONG, device=torch.device("cpu"))
    return bool(encoder.pos_enc.pe.is_inference())


def test_after_revert_it_is_as_in_stock() -> None:
    assert [result.value for result in run_ranks(after_revert, 1, group=False)] == [
        True
    ]


class Learned(torch.nn.Module):
    """Positions that are computed from a parameter: where gradients are off, none of them has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def extend_pe(self, length: int, device: Any, dtype: Any) -> None:
        self.register_buffer(
            "cos", torch.ones(length, 8, device=device) * self.scale, persistent=False
        )


def gradients_stay_off(rank: int, size: int) -> bool:
    nemo_patches.apply()
    encoder: Any = encoders.conformer()
    encoder.pos_enc = Learned()
    with torch.inference_mode():
        encoders.sync(encoder, LONG)
    return bool(encoder.pos_enc.cos.requires_grad)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_as_off_as_they_were(size: int) -> None:
    assert not any(
        result.value for result in run_ranks(gradients_stay_off, size, group=size > 1)
    )


class Rotary(torch.nn.Module):
    """As in NeMo's main: tables of other names than today's, each replaced by a longer one. `scale`
    keeps its shape.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def extend_pe(self, length: int, device: Any, dtype: Any) -> None:
        self.inner.extend_pe(length, device, dtype)  # type: ignore[operator]
        angles = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(
            1
        ) / torch.arange(1, 9)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)
        self.register_buffer("scale", torch.tensor([float(length)]), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def tables(encoder: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(encoder.pos_enc, name) for name in ("cos", "sin")}


def expected(
    length: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    rotary = Rotary(torch.nn.Module())
    rotary.inner.extend_pe = lambda *_: None  # type: ignore[assignment]
    rotary.extend_pe(length, "cpu", dtype)
    return {"cos": rotary.cos, "sin": rotary.sin}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def rotary_growth(rank: int, size: int) -> None:
    said, own_names = Said(), dict(vars(Rotary))
    encoder: Any = encoders.conformer()
    encoder.pos_enc = Rotary(encoder.pos_enc)
    encoder.pos_enc.extend_pe(encoders.POSITIONS, "cpu", torch.float32)
    nemo_patches.apply(sync="local")
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    built = [(path, buffer.shape) for path, buffer in encoder.named_buffers()]
    for step in range(4):
        frames = 8 * LONG if rank == step % 2 else SHORT
        encoders.run(model, frames, seed=step).pow(2).mean().backward()
    length = encoder.max_audio_length
    assert length > encoders.POSITIONS
    # In DDP's order.
    assert [(path, buffer.shape) for path, buffer in encoder.named_buffers()] == built
    assert same(tables(encoder), expected(length))
    assert same(tables(copy.deepcopy(encoder)), expected(length))
    assert same(tables(pickle.loads(pickle.dumps(encoder))), expected(length))
    (line,) = [line for line in said.lines if "Rotary." in line]
    assert (
        "buffer Rotary.scale has other values since its encoder has grown, and the same"
        " shape" in line
    )
    encoder.to_empty(device="cpu", recurse=False)  # of its own buffers alone
    assert same(tables(encoder), expected(length))
    assert {
        name: tensor.dtype for name, tensor in tables(encoder.half()).items()
    } == dict.fromkeys(("cos", "sin"), torch.float16)
    encoder.pos_enc.float()
    assert {tensor.dtype for tensor in tables(encoder).values()} == {torch.float32}
    assert [(path, buffer.shape) for path, buffer in encoder.named_buffers()] == built
    encoder.float()
    encoders.sync(encoder, 2 * length)
    assert same(tables(encoder), expected(2 * length))
    nemo_patches.revert()
    assert dict(vars(Rotary)) == own_names
    assert not is_private(encoder.pos_enc)
    assert encoder.pos_enc._buffers["cos"].shape == (2 * length, 8)


@pytest.mark.one_nemo
def test_buffers_grow_privately_by_their_shape_whatever_their_name() -> None:
    run_ranks(rotary_growth, 2)
