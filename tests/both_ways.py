"""One program for both ways in, apply() and a diff: each target class through what training and its users do with it.

tests/test_both_ways.py runs it as a script, once beside stock NeMo and once on a NeMo with its diff. It leaves what
happened on each of two ranks in a file: values and tensors by scenario, and the log lines.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import io
import pickle
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import encoders
import ranks
import torch
import torch.distributed as dist

# nemo_patches is imported in the ranks, where NeMo is there already: on a NeMo with its diff it brings all of it.

SIZE = 2
# Seconds; no wait of ranks that are in step may run out, so that every counter is determined. After the two waits that
# do, fresh encoders of the kind inherit a 64th of it: 9 s, which a busy machine keeps.
PATIENT = 600.0
SHORT = 0.3
LONG = 400  # frames; the encoders are built for fewer


@dataclass(frozen=True)
class Record:
    """One rank's life. `world` is what differs from the other world by design, and is not compared."""

    world: dict[str, Any]
    scenarios: dict[str, Any]
    lines: list[str]

    def of(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


class Whole(torch.nn.Module):
    """A model around an encoder, with a BatchNorm beside it in DDP's flat broadcast of buffers."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(encoders.FEATURES)
        self.encoder = encoder

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> Any:
        features = self.norm(audio_signal)
        if not hasattr(self.encoder, "audio_proj"):
            return self.encoder(audio_signal=features, length=length)
        # The punctuation model: of its forward, what it does with a length.
        frames = features.size(2)
        self.encoder.update_max_seq_length(seq_length=frames, device=features.device)
        mask = self.encoder.make_pad_mask(frames, length - 10)
        return (self.encoder.audio_proj(features.mean(1).unsqueeze(-1)) * mask.unsqueeze(-1),)


def program(rank: int, size: int, ports: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything, on one rank: before there is a process group, under one, after it, and under a second one."""
    import nemo_patches

    if can_apply():
        nemo_patches.apply()
    scenarios: dict[str, Any] = {"settings at the start": str(nemo_patches.status().settings)}
    world: dict[str, Any] = {}
    targets = {**encoders.makers()}
    if has_punctuation():
        targets["punctuation"] = encoders.punctuation

    def play(when: str, *parts: Callable[..., Any]) -> None:
        for name, make in targets.items():
            for scenario in parts:
                torch.manual_seed(0)
                random.seed(0)
                title = f"{name}: {scenario.__name__} {when}"
                assert title not in scenarios
                scenarios[title] = scenario(make, rank)

    older: dict[str, torch.nn.Module] = {}
    for name, make in targets.items():
        torch.manual_seed(0)
        older[name] = make()
        world[name] = where(older[name])
    # Compiling takes most of the time: alone, the ranks do the same.
    play("alone", looks, grown, *([compiled] if rank == 0 else []), set_directly, moved, copied)
    ranks.join_group(rank, size, ports[0])
    apply()
    for name, encoder in older.items():
        scenarios[f"{name}: trained in a group, built before it"] = trained(lambda built=encoder: built, rank)
    play("in a group", trained, local, overlapped, flag_off, uneven, raising, subclass)
    play("in a group", grown, set_directly, moved, copied, attention)
    play("in a group", compiled)  # last: what it leaves in the process is not for the others
    dist.barrier()
    dist.destroy_process_group()
    for name, encoder in older.items():
        encoders.sync(encoder, 3 * LONG + rank)
        scenarios[f"{name}: after the group"] = [state(encoder), set_directly(lambda same=encoder: same, rank)]
    ranks.join_group(rank, size, ports[1])
    for name, encoder in older.items():
        encoders.sync(encoder, 6 * LONG + rank)
        scenarios[f"{name}: in a second group"] = [state(encoder), counters()]
    play("in a second group", trained)
    dist.barrier()
    return world, scenarios


def can_apply() -> bool:
    return importlib.util.find_spec("nemo_patches.patching") is not None


def has_punctuation() -> bool:
    try:
        return importlib.util.find_spec(encoders.PUNCTUATION[0]) is not None
    except ModuleNotFoundError as error:
        if not encoders.PUNCTUATION[0].startswith(str(error.name)):
            raise
        return False


def apply(**settings: Any) -> None:
    import nemo_patches

    nemo_patches.apply(**{"timeout": PATIENT, **settings})


def where(encoder: torch.nn.Module) -> dict[str, Any]:
    """Which NeMo this is, and how the bounded sync came into it."""
    owner = type(encoder)
    update = getattr(owner, update_of(owner))
    return {
        "file": inspect.getfile(owner),
        "can apply": can_apply(),
        "built in": getattr(update, "__nemo_patches__", ""),
        "sync": Path(update.__code__.co_filename).parent,
        "source": inspect.getsource(update),
    }


def update_of(owner: type) -> str:
    return "update_max_seq_length" if hasattr(owner, "update_max_seq_length") else "update_max_sequence_length"


def state(encoder: torch.nn.Module) -> dict[str, Any]:
    """All that length sync and growth may change in an encoder."""
    return {
        "maximum": encoder.max_audio_length,
        "read": {path: tensor.clone() for path, tensor in encoders.length_sized(encoder).items()},
        "registered": {path: (buffer.shape, buffer.dtype) for path, buffer in encoder.named_buffers()},
        "private": private(encoder),
        "state_dict": {path: tensor.shape for path, tensor in encoder.state_dict().items()},
    }


def private(encoder: torch.nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": (tensor.shape, tensor.dtype, tensor.device.type)
        for path, module in encoder.named_modules()
        for name, tensor in (vars(module) | vars(module).get("_nemo_patches_private", {})).items()
        if isinstance(tensor, torch.Tensor)
    }


def counters() -> tuple[Any, ...]:
    """Of the encoder that was called first as the last one; the time that it waited is never the same."""
    import nemo_patches

    last = nemo_patches.status().encoders[-1]
    return last.encoder, last.calls, last.rounds, last.fallbacks, last.timeouts, last.ended


def output(module: torch.nn.Module, frames: int = LONG, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return encoders.run(module, frames, seed)


def tried(function: Callable[[], Any]) -> Any:
    """What it returns, or what it raises: stock cannot do everything with every class either."""
    try:
        return function()
    except Exception as error:
        return [owner.__name__ for owner in type(error).__mro__]


# The scenarios: a maker of one target class and the rank; what they return is compared.


def looks(make: Callable[[], Any], rank: int) -> Any:
    """What inspect, help() and IDEs tell of the class and its methods."""
    owner = type(make())
    found: dict[str, Any] = {
        "class": (owner.__name__, owner.__qualname__, owner.__module__, owner.__doc__, inspect.isclass(owner)),
        "construction": str(inspect.signature(owner)),
        "order": [base.__qualname__ for base in owner.__mro__],
        "own names": sorted(vars(owner)),
        "abstract": inspect.isabstract(owner),
    }
    for name in (update_of(owner), "set_max_audio_length", "_apply", "forward"):
        if hasattr(owner, name):
            method = getattr(owner, name)
            about = (method.__name__, method.__qualname__, method.__module__, method.__doc__, method.__annotations__)
            kind = (inspect.isfunction(method), hasattr(method, "__wrapped__"), method.__defaults__)
            found[name] = (str(inspect.signature(method)), *map(str, about), *kind)
    return found


def grown(make: Callable[[], Any], rank: int) -> Any:
    whole = Whole(make()).eval()
    return [output(whole), state(whole.encoder), output(whole, 50), output(whole, 3 * LONG), state(whole.encoder)]


def compiled(make: Callable[[], Any], rank: int) -> Any:
    """Without a process group the graph breaks as seldom as stock's; in one the sync breaks it, like stock's reduce."""
    encoder = make()
    # torch cannot compile a Conformer inside another module, in stock neither.
    module = (Whole(encoder) if hasattr(encoder, "audio_proj") else encoder).eval()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    encoded = output(torch.compile(module, backend=backend), LONG + rank)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {"encoded": encoded, "graphs": graphs, "breaks": breaks, "end": state(encoder)}


def set_directly(make: Callable[[], Any], rank: int) -> Any:
    """As change_attention_model and users do it: shorter, longer, and while the encoder is in use."""
    encoder = make().eval()
    found = []
    if hasattr(encoder, "set_max_audio_length"):
        for length in (10, 300 + rank, 4 * LONG, 20):
            encoder.set_max_audio_length(length)
            found.append(state(encoder))
    encoders.sync(encoder, 5 * LONG)
    return [*found, state(encoder)]


MOVES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.float64),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "meta": lambda model: model.to("meta"),
}


def moved(make: Callable[[], Any], rank: int) -> Any:
    """Moves of a whole model that has grown, and a growth after them (none on meta)."""
    found: dict[str, Any] = {}
    for move, function in MOVES.items():
        whole = Whole(make()).eval()
        output(whole, LONG + rank)
        function(whole)
        states = [state(whole.encoder)]
        if move == "meta":
            states[0]["read"] = {path: (tensor.shape, tensor.is_meta) for path, tensor in states[0]["read"].items()}
        else:
            encoders.sync(whole.encoder, 3 * LONG)
            states.append(state(whole.encoder))
        found[move] = states
    return found


def copied(make: Callable[[], Any], rank: int) -> Any:
    """Copies of a grown model: what they hold, what they compute, and how they grow on."""
    whole = Whole(make()).eval()
    output(whole, LONG + rank)

    def saved() -> Any:
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def there(copy_of: Callable[[], Any]) -> Any:
        other = copy_of()
        before = state(other.encoder)
        # At these lengths no rank has to hear of the other's: a copy is a new encoder, which is called on every rank.
        return [before, output(other, 50), output(other, 2 * LONG), state(other.encoder)]

    loaded = Whole(make()).eval()
    loaded.load_state_dict(whole.state_dict())
    return {
        "deepcopy": tried(lambda: there(lambda: copy.deepcopy(whole))),
        "pickle": tried(lambda: there(lambda: pickle.loads(pickle.dumps(whole)))),
        "torch.save": tried(lambda: there(saved)),
        "load_state_dict": there(lambda: loaded),
    }


def trained(make: Callable[[], Any], rank: int) -> Any:
    """DDP with lengths beyond what the encoder was built for, other ones on each rank, and evaluations in between."""
    chance = random.Random(rank)
    encoder = make()
    whole = Whole(encoder)
    model = torch.nn.parallel.DistributedDataParallel(whole) if has_backward(encoder) else whole
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    found: list[Any] = []
    torch.manual_seed(rank)
    for step in range(4):
        with torch.set_grad_enabled(has_backward(encoder)):
            encoded = encoders.run(model, chance.randint(40, LONG), seed=10 * step + rank)
        if encoded.requires_grad:
            optimizer.zero_grad()
            encoded.pow(2).mean().backward()
            found += [parameter.grad.clone() for parameter in whole.parameters() if parameter.grad is not None]
            optimizer.step()
        found += [encoded.detach().clone(), state(encoder)]
        if step == 1:
            whole.eval()
            found += [output(whole, chance.randint(40, 2 * LONG), seed=batch) for batch in range(2)]
            found.append(state(encoder))
            whole.train()
    return {"steps": found, "weights": weights(whole), "counters": counters(), "end": state(encoder)}


def has_backward(encoder: torch.nn.Module) -> bool:
    return type(encoder).__name__ != "TransformerEncoder"  # its FlexAttention has none on CPU


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {path: tensor.clone() for path, tensor in module.state_dict().items()}


def local(make: Callable[[], Any], rank: int) -> Any:
    """No communication: under DDP one rank's buffers grow, the other's do not."""
    apply(sync="local")
    encoder = make()
    whole = Whole(encoder)
    model = torch.nn.parallel.DistributedDataParallel(whole) if has_backward(encoder) else whole
    outputs = []
    for step in range(3):
        with torch.set_grad_enabled(has_backward(encoder)):
            encoded = encoders.run(model, LONG if rank == 0 and step == 1 else 50, seed=step)
        if encoded.requires_grad:
            encoded.pow(2).mean().backward()
        outputs.append(encoded.detach().clone())
    wrong = encoders.wrong_rows(encoder)
    apply()
    return {"outputs": outputs, "wrong rows": wrong, "counters": counters(), "end": state(encoder), **weights(whole)}


def overlapped(make: Callable[[], Any], rank: int) -> Any:
    """A call uses what an earlier round brought: the first one its own length, and one of the next the larger one."""
    apply(sync="overlapped")
    encoder = make()
    encoders.sync(encoder, 100 + 200 * rank)
    first = state(encoder)
    deadline = time.monotonic() + PATIENT
    while encoder.max_audio_length < 300:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        encoders.sync(encoder, 100 + 200 * rank)
    apply()
    dist.barrier()
    return [first, state(encoder)]


def flag_off(make: Callable[[], Any], rank: int) -> Any:
    encoder = make()
    if not encoders.has_flag(encoder):
        return "no flag"
    encoder.sync_max_audio_length = False
    encoders.sync(encoder, LONG + 10 * rank)
    return [state(encoder), counters()]


def uneven(make: Callable[[], Any], rank: int) -> Any:
    """Rank 1 has one evaluation batch more. The order of the calls is fixed, so that every counter is determined."""
    encoder = make()
    maxima = []

    def call(length: int) -> None:
        encoders.sync(encoder, length)
        maxima.append(encoder.max_audio_length)

    for step in range(2):
        call(100 * (step + 1) + rank)
    encoder.eval()
    call(250 + rank)
    dist.barrier()
    if rank == 1:
        apply(timeout=SHORT)
        call(400)
        apply()
    dist.barrier()
    encoder.train()
    if rank == 1:
        call(500)  # its round is on its way: it uses its own length and does not wait
    dist.barrier()
    if rank == 0:
        call(600)  # this round meets that one
    ranks.come_in(encoder)
    for step in range(2):
        call(700 + 100 * step + rank)
    return [maxima, counters(), state(encoder)]


def raising(make: Callable[[], Any], rank: int) -> Any:
    encoder = make()
    encoders.sync(encoder, 100)
    dist.barrier()
    found = None
    if rank == 1:
        apply(timeout=SHORT, on_timeout="raise")
        try:
            encoders.sync(encoder, 200)
        except Exception as error:
            found = (plain(str(error)), [owner.__name__ for owner in type(error).__mro__])
        apply()
    dist.barrier()
    return [found, counters(), state(encoder)]


def subclass(make: Callable[[], Any], rank: int) -> Any:
    """A user's class that overrides the method and calls super(); and one that reduces itself, which is said."""
    encoder = make()
    owner: Any = type(encoder)
    update = update_of(owner)
    seen = []

    def override(self: Any, seq_length: int, device: Any) -> None:
        seen.append(int(seq_length))
        getattr(super(derived, self), update)(seq_length + 7, device)

    def reduces(self: Any, seq_length: int, device: Any) -> None:
        dist.all_reduce(torch.tensor([seq_length]))

    type(f"Own{owner.__name__}", (owner,), {update: reduces})
    derived = type(f"My{owner.__name__}", (owner,), {update: override})
    encoder.__class__ = derived
    whole = Whole(encoder).eval()
    return [output(whole, LONG + rank), seen, state(encoder), counters()]


def attention(make: Callable[[], Any], rank: int) -> Any:
    """change_attention_model makes new positional encodings, and sets their length itself."""
    whole = Whole(make()).eval()
    encoder: Any = whole.encoder
    if not hasattr(encoder, "change_attention_model"):
        return "not in this class"
    from omegaconf import OmegaConf

    rest = {"dropout": 0.1, "dropout_emb": 0.0, "dropout_att": 0.0, "use_bias": True}
    encoder._cfg = OmegaConf.create({**encoders.CONFORMER, **rest})
    found: list[Any] = [output(whole, LONG + rank)]
    for model, context in (("rel_pos_local_attn", [8, 8]), ("abs_pos", [-1, -1]), ("rel_pos", [-1, -1])):
        torch.manual_seed(1)
        encoder.change_attention_model(model, context)
        whole.eval()
        found += [output(whole, 100), state(encoder), output(whole, 2 * LONG + rank), state(encoder)]
    return found


LATE = "other ranks waited for this one"  # said if the process is still there when the others have found out


def plain(line: str) -> str:
    """A log line without what is never the same: when, on which host, how many seconds, who was seen to be missing."""
    line = re.sub(r"^.* nemo_patches (?=[A-Z]+ \[)", "", line)
    line = re.sub(r"^(\w+ \[rank \d+/\d+) [^]]*", r"\1", line)
    line = re.sub(r"(recovered:|Missing:).*", r"\1", line)
    return re.sub(r"\d+\.\d+ s\b", "N s", line)


def main(path: str) -> None:
    # The punctuation model's collection takes long to import: once for both ranks, like the rest.
    preload = ["nemo.collections.asr", "nemo_patches.patching.monkeypatch", encoders.PUNCTUATION[0]]
    ranks._context.set_forkserver_preload(preload)
    ports = [ranks.free_port(), ranks.free_port()]
    results = ranks.run_ranks(program, SIZE, ports, group=False, limit=400)
    records = []
    for result in results:
        lines = [line for line in result.lines() if LATE not in line]
        records.append(Record(*result.value, [plain(line) for line in lines]))
    Path(path).write_bytes(pickle.dumps([vars(record) for record in records]))


if __name__ == "__main__":
    main(sys.argv[1])
