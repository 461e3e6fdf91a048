"""Real ranks of a NeMo with the edit, without nemo_patches: `scenarios.py edited NAME ...` prints a
JSON line for each.

NeMo is imported once, and every scenario forks its ranks from there. A line has what each rank
returned, what it wrote to stderr, its exit code, and how long its interpreter took to end.
"healthy" runs on stock NeMo, too.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))
sys.modules["nemo_patches"] = None  # type: ignore[assignment]  # what is vendored needs none of it

import encoders  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import free_port, wait_until  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

LIMIT_S = 240.0  # of a scenario
AT_ONCE = 4  # scenarios: most of their time they wait
# An eighth of it, for which a rank waits after its first time, must bear a busy machine
TIMEOUT_S = 4.0
LONG_S = 60.0  # for what must come
Encoder = Any


def use(timeout: float = TIMEOUT_S, watch: float = 0.0) -> None:
    """The settings of this rank; a process has them from its environment."""
    from nemo.collections.asr.parts.utils import bounded_length_sync

    bounded_length_sync.TIMEOUT_S = timeout
    bounded_length_sync.WATCH_S = watch


def in_step(timeout: float = TIMEOUT_S, watch: float = 0.0) -> Encoder:
    """A Conformer after two calls that every rank has made: all are connected, however long that
    takes.
    """
    use(timeout=LONG_S)
    encoder = encoders.conformer()
    for length in (100, 101):
        call(encoder, length)
    dist.barrier()
    use(timeout, watch)
    return encoder


def call(encoder: Encoder, length: int) -> dict[str, Any]:
    """One call of the encoder's length sync."""
    seconds = encoders.sync(encoder, length)
    return {"seconds": seconds, "length": length, "max": encoder.max_audio_length}


def until_agreed(
    encoder: Encoder, rank: int, first: int, ahead: int
) -> list[dict[str, Any]]:
    """Calls with growing lengths, each rank its own, until three in a row have ended with the
    largest on every rank.

    ahead: the rank that has made more calls; its first one here is before the others'.
    """
    found: list[dict[str, Any]] = []
    in_a_row = 0
    while in_a_row < 3 and len(found) < 40:
        if rank != ahead and not found:
            wait_for(f"{first}: rank {ahead} has called")
        found.append(call(encoder, first + 10 * len(found) - rank))
        if rank == ahead:
            told(f"{first}: rank {ahead} has called")
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found[-1])
        is_agreed = {one["max"] for one in of_ranks} == {
            max(one["length"] for one in of_ranks)
        }
        in_a_row = in_a_row + 1 if is_agreed else 0
    assert in_a_row == 3, found
    return found


def said() -> str:
    """What this rank has written to stderr."""
    return Path("/proc/self/fd/2").read_text()


def told(event: str) -> None:
    store().set(event, "")


def wait_for(event: str) -> None:
    wait_until(lambda: store().check([event]), LONG_S)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def late(rank: int) -> Any:
    encoder = in_step()
    if rank == 1:
        wait_for("rank 0 has said it")
    first = call(encoder, 300 - rank)
    if rank == 0:
        wait_until(lambda: "rank 1 made 2" in said(), LONG_S)
        told("rank 0 has said it")
    dist.barrier()
    return {"first": first, "then": until_agreed(encoder, rank, 400, ahead=0)}


def skip(rank: int) -> Any:
    encoder = in_step()
    first = call(encoder, 300) if rank == 0 else None
    dist.barrier()
    return {"first": first, "then": until_agreed(encoder, rank, 400, ahead=0)}


def extra(rank: int) -> Any:
    encoder = in_step()
    if rank == 1:
        call(encoder, 290)
    dist.barrier()
    return {"then": until_agreed(encoder, rank, 400, ahead=1)}


def two_encoders(rank: int) -> Any:
    """Rank 1 leaves out one call of the second."""
    first = in_step()
    use(LONG_S)
    second = encoders.conformer()
    call(second, 100)
    use()
    call(first, 200 + rank)
    if rank == 0:
        call(second, 300)
    dist.barrier()
    found = until_agreed(first, rank, 400, ahead=0)
    return {"first": found, "then": until_agreed(second, rank, 500, ahead=0)}


def stopped(rank: int, which: int) -> Any:
    """The stopped rank may be the one with the store's server."""
    encoder = in_step()
    pids: list[Any] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    found = {}
    if rank == which:
        wait_until(lambda: store().check(["stopped and continued"]), LONG_S)
    else:
        os.kill(pids[which], signal.SIGSTOP)
        found["first"] = [call(encoder, 300 + 10 * number) for number in range(3)]
        os.kill(pids[which], signal.SIGCONT)
        told("stopped and continued")
    dist.barrier()
    return {**found, "then": until_agreed(encoder, rank, 400, ahead=1 - which)}


def stopped_rank(rank: int) -> Any:
    return stopped(rank, which=1)


def stopped_server(rank: int) -> Any:
    return stopped(rank, which=0)


def dead(rank: int) -> Any:
    encoder = in_step(timeout=20.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [call(encoder, 300 + 10 * number) for number in range(3)]


def uneven(rank: int) -> Any:
    """Rank 0 has three evaluation batches more; then they train on."""
    encoder = in_step()
    encoder.eval()
    for number in range(5 if rank == 0 else 2):
        call(encoder, 200 + number)
    dist.barrier()
    encoder.train()
    return {"then": until_agreed(encoder, rank, 400, ahead=0)}


def leaves(rank: int) -> Any:
    """Rank 0 ends with a round in flight: rank 1, which stays alive, does not answer."""
    encoder = in_step()
    if rank == 0:
        return call(encoder, 300)
    time.sleep(20)
    return None


def leaves_unconnected(rank: int) -> Any:
    """Rank 0 ends before the ranks have met: rank 1 makes no call."""
    use()
    if rank == 0:
        return call(encoders.conformer(), 300)
    time.sleep(20)
    return None


def with_length_of_its_own(rank: int, long_rank: int) -> Any:
    """Under DDP one rank's table grows and the other's does not: nobody is asked for a length."""
    use(timeout=0)
    wrong = {}
    for name, maker in encoders.makers().items():
        if name in encoders.FORWARD_ONLY:
            continue
        torch.manual_seed(0)
        encoder = maker()
        model = DistributedDataParallel(encoder)
        for step in range(4):
            frames = 1200 if (step, rank) == (1, long_rank) else 40
            encoders.run(model, frames, seed=step).sum().backward()
        wrong[name] = [encoders.wrong_rows(encoder), encoder.max_audio_length]
    return wrong


def growth0(rank: int) -> Any:
    return with_length_of_its_own(rank, long_rank=0)


def growth1(rank: int) -> Any:
    return with_length_of_its_own(rank, long_rank=1)


def healthy(rank: int) -> Any:
    """Steps of every encoder, of growing and unequal lengths; in hexadecimal, for a comparison to
    the last bit.
    """
    if sys.argv[1] != "stock":
        use(timeout=LONG_S)
    found = {}
    for name, maker in encoders.makers().items():
        torch.manual_seed(0)
        encoder = maker()
        has_backward = name not in encoders.FORWARD_ONLY
        model = DistributedDataParallel(encoder) if has_backward else encoder
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
        sums, longest = [], []
        for step in range(12 if has_backward else 5):
            frames = 40 + 37 * step * (1 + rank)
            with torch.set_grad_enabled(has_backward):
                encoded = (
                    (encoders.run(model, frames, seed=10 * step + rank) - 1)
                    .square()
                    .mean()
                )
            if has_backward:
                optimizer.zero_grad()
                encoded.backward()
                optimizer.step()
            sums.append(encoded.item().hex())
            longest.append(encoder.max_audio_length)
        tables = {
            path: digest(tensor)
            for path, tensor in encoders.length_sized(encoder).items()
        }
        weights = {
            path: digest(tensor) for path, tensor in encoder.state_dict().items()
        }
        found[name] = {
            "sums": sums,
            "max": longest,
            "tables": tables,
            "weights": weights,
        }
    return found


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().numpy().tobytes()
    return f"{list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def watch(rank: int) -> Any:
    """Rank 2 does not come to its sixth call; the others, which do not sync here, wait in a
    collective of their own.
    """
    use(timeout=0, watch=1.0)
    encoder = encoders.conformer()
    for number in range(6):
        if rank == 2 and number == 5:
            wait_for("rank 0 has said it")
            wait_for("rank 1 has said it")
        call(encoder, 100)
        if rank != 2 and number == 5:
            wait_until(lambda: "no encoder call" in said(), LONG_S)
            told(f"rank {rank} has said it")
        dist.barrier()
    return None


def flag_is_off(rank: int) -> Any:
    """No rank asks for lengths, and the calls count for the watch all the same."""
    encoder = encoders.conformer()
    if not encoders.has_flag(encoder):
        return "no flag"
    use(watch=1.0)
    encoder.sync_max_audio_length = False
    if rank == 0:
        call(encoder, 300)
        wait_until(lambda: "rank 1 made 0" in said(), LONG_S)
    dist.barrier()
    return encoder.max_audio_length


def switched_off(rank: int) -> Any:
    use(timeout=0, watch=0)
    before = threading.active_count()
    encoder = encoders.conformer()
    found = call(encoder, 300 + rank)
    dist.barrier()
    return {**found, "threads": threading.active_count() - before}


def again(rank: int) -> Any:
    """A second process group, on the same store."""
    until_agreed(in_step(), rank, 200, ahead=0)
    second = dist.PrefixStore("again", store())
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=second, rank=rank, world_size=2, timeout=timedelta(seconds=LONG_S)
    )
    return {"then": until_agreed(in_step(), rank, 400, ahead=0)}


def inference(rank: int) -> Any:
    """A validation longer than the table, then training on it."""
    use(timeout=LONG_S)
    found = {}
    for name, maker in encoders.makers().items():
        encoder = maker().eval()
        with torch.inference_mode():
            encoders.run(encoder, 1200)
        if name not in encoders.FORWARD_ONLY:
            encoders.run(encoder.train(), 1200).sum().backward()
        found[name] = [encoders.wrong_rows(encoder), encoder.max_audio_length]
    return found


def lives_on(rank: int) -> str:
    """Rank 0 makes one evaluation call more; after a clean end both processes live on."""
    encoder = in_step(watch=1.0)
    encoder.eval()
    if rank == 0:
        call(encoder, 300)
    dist.barrier()
    dist.destroy_process_group()
    before = said()
    time.sleep(4)  # nothing is to come, in four times what the watch waits
    return said().removeprefix(before)


def ends_first(rank: int) -> Any:
    """Rank 0, which has the store, ends its process group and lives on; rank 1 keeps its own."""
    encoder = in_step(watch=1.0)
    if rank == 0:
        dist.destroy_process_group()
        time.sleep(4)
        return None
    wait_until(lambda: "no encoder call" in said(), LONG_S)
    return call(encoder, 300)


def ends_soon(rank: int) -> Any:
    """Rank 0 times out in its first call, and ends without its interpreter's end."""
    use()
    if rank == 0:
        call(encoders.conformer(), 300)
        os._exit(0)
    time.sleep(TIMEOUT_S + 4)
    return None


def killed(rank: int) -> Any:
    """Rank 1 ends right after three calls; rank 0 makes one more, and then waits."""
    use(timeout=0, watch=1.0)
    encoder = encoders.conformer()
    for _ in range(3):
        call(encoder, 100)
    if rank == 1:
        os._exit(0)
    call(encoder, 100)
    wait_until(lambda: "no encoder call" in said(), LONG_S)
    return None


def many_encoders(rank: int) -> Any:
    """What 25 encoders more cost, which are made, called and dropped."""
    first = in_step()
    before = resources()
    for number in range(25):
        call(encoders.conformer(), 200 + number)
        gc.collect()
    after = resources()
    dist.barrier()
    return {"before": before, "after": after, "then": [call(first, 300 + rank)]}


def resources() -> list[int]:
    """Descriptors and threads of this process."""
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]


def many_groups(rank: int) -> Any:
    """Process groups on one server; in the first one rank 1 calls no encoder."""
    use(timeout=2.0)
    base = store()
    found = []
    for number in range(12):
        if number or rank == 0:
            found.append({**call(encoders.conformer(), 100 + rank), "now": resources()})
        dist.barrier()
        dist.destroy_process_group()
        wait_until(lambda: not has_thread("length sync"), LONG_S)
        its_own = dist.PrefixStore(f"{number}", base)
        dist.init_process_group("gloo", store=its_own, rank=rank, world_size=2)
    return found


def has_thread(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Its last item comes out of a FIFO, which nobody writes to."""

    def __init__(self, fifo: Path | None) -> None:
        self._fifo = fifo

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and self._fifo is not None:
            self._fifo.read_text()
        return torch.zeros(encoders.FEATURES, 40)


def fifo(rank: int) -> Any:
    """Rank 1 waits in its data set, and rank 0 in DDP's broadcast of buffers, before the encoder."""
    use(watch=2.0)
    encoder = encoders.conformer()
    encoder.register_buffer("broadcast", torch.zeros(1))
    model = DistributedDataParallel(encoder)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fifo")
        os.mkfifo(path)
        threading.Thread(target=write_at_last, args=(rank, path), daemon=True).start()
        for features in torch.utils.data.DataLoader(Slow(path if rank == 1 else None)):
            model(audio_signal=features, length=torch.tensor([40]))[0].sum().backward()
        dist.barrier()
    return None


def write_at_last(rank: int, path: Path) -> None:
    """Once both ranks have said where they are."""
    wait_until(lambda: "no encoder call" in said(), LONG_S)
    told(f"rank {rank} has said it")
    wait_for(f"rank {1 - rank} has said it")
    if rank == 1:
        path.write_text("")


def long_evaluation(rank: int) -> Any:
    """More calls than 15 bits count; an encoder that is trained then starts anew."""
    encoder = in_step(timeout=LONG_S)
    encoder.eval()
    for number in range(40_000):
        encoders.sync(encoder, 50 + number % 2)
    found = [call(encoder, 300 + rank)]
    encoder.train()
    return {"then": [*found, call(encoder, 400 + rank)]}


def compiled(rank: int) -> Any:
    """One graph, with lengths of one's own; and no graph, which agrees."""
    encoder = in_step(timeout=LONG_S)
    module = Synced(encoder)
    graph = torch.compile(module, fullgraph=True, backend="eager")
    found = [
        [graph(torch.zeros(length)), encoder.max_audio_length]
        for length in (50, 70, 300 + rank)
    ]
    dist.barrier()
    return {"graph": found, "then": [call(encoder, 400 + rank)]}


class Synced(torch.nn.Module):
    """The length sync of an encoder, as its forward has it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, signal: torch.Tensor) -> int:
        self.encoder.update_max_seq_length(signal.size(0), signal.device)
        return signal.size(0)


def forked(rank: int) -> Any:
    """A child of a rank, of before its first call and of after it, calls the encoder, too."""
    use(timeout=LONG_S)
    encoder = encoders.conformer()
    found = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            calls = [call(encoder, 500 + rank)["max"] for _ in range(3)]
            os._exit(0 if calls == [500 + rank] * 3 else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        dist.barrier()
        found.append(call(encoder, 200 + 10 * number + rank))
    return found


def hidden_group(rank: int) -> Any:
    """As a ParallelExpertEncoder does it: for one call of rank 0 there is no process group."""
    encoder = in_step()
    if rank == 0:
        is_initialized = dist.is_initialized
        dist.is_initialized = lambda: False
        call(encoder, 200)
        dist.is_initialized = is_initialized
    dist.barrier()
    return {"then": [call(encoder, 300 + rank), call(encoder, 400 + rank)]}


SCENARIOS: dict[str, tuple[Callable[[int], Any], int]] = {
    "late": (late, 2),
    "skip": (skip, 2),
    "extra": (extra, 2),
    "two encoders": (two_encoders, 2),
    "stopped rank": (stopped_rank, 2),
    "stopped server": (stopped_server, 2),
    "dead": (dead, 2),
    "uneven": (uneven, 2),
    "leaves": (leaves, 2),
    "leaves unconnected": (leaves_unconnected, 2),
    "growth0": (growth0, 2),
    "growth1": (growth1, 2),
    "healthy": (healthy, 2),
    "watch": (watch, 3),
    "flag is off": (flag_is_off, 2),
    "switched off": (switched_off, 2),
    "again": (again, 2),
    "inference": (inference, 2),
    "lives on": (lives_on, 2),
    "ends first": (ends_first, 2),
    "ends soon": (ends_soon, 2),
    "killed": (killed, 2),
    "many encoders": (many_encoders, 2),
    "many groups": (many_groups, 2),
    "fifo": (fifo, 2),
    "long evaluation": (long_evaluation, 2),
    "compiled": (compiled, 2),
    "forked": (forked, 2),
    "hidden group": (hidden_group, 2),
}


def join(rank: int, size: int, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    timeout = timedelta(seconds=LONG_S)
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=size, timeout=timeout
    )


def be_rank(
    function: Callable[[int], Any], rank: int, size: int, port: int, folder: Path
) -> None:
    """In the child; what it returns is in the file before the interpreter ends, with the time."""
    log = os.open(folder / f"{rank}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    outcome: dict[str, Any] = {}
    try:
        join(rank, size, port)
        outcome["value"] = function(rank)
    except BaseException:
        outcome["error"] = traceback.format_exc()
    outcome["at"] = time.time()
    (folder / f"{rank}.part").write_text(json.dumps(outcome))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


class Run:
    """A scenario that runs: its ranks, and how each has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function, self._size = SCENARIOS[name]
        self._began_at = time.monotonic()
        self._folder = Path(tempfile.mkdtemp())
        self._ends: dict[int, tuple[int, float]] = {}
        port = free_port()
        self._pids = []
        for rank in range(self._size):
            pid = os.fork()
            if pid == 0:
                be_rank(self._function, rank, self._size, port, self._folder)
                sys.exit(0)  # the interpreter's whole end
            self._pids.append(pid)

    def has_ended(self) -> bool:
        """Whether all have; after the limit they are killed."""
        for pid in self._pids:
            if pid in self._ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._ends[pid] = (os.waitstatus_to_exitcode(status), time.time())
            elif time.monotonic() - self._began_at > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
        return len(self._ends) == self._size

    def result(self) -> dict[str, Any]:
        ranks = []
        for rank, pid in enumerate(self._pids):
            code, ended_at = self._ends[pid]
            file = self._folder / f"{rank}.json"
            outcome = json.loads(file.read_text()) if file.exists() else {}
            took = ended_at - outcome.pop("at", ended_at)
            log = (self._folder / f"{rank}.log").read_text(errors="replace")
            ranks.append({**outcome, "code": code, "stderr": log, "exit_s": took})
        shutil.rmtree(self._folder)
        return {
            "name": self.name,
            "ranks": ranks,
            "seconds": time.monotonic() - self._began_at,
        }


def main() -> None:
    """Arguments: "stock" or "edited", and scenarios."""
    gc.disable()
    import nemo.collections.asr.modules

    for module in ("squeezeformer_encoder", "transformer_encoder"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"nemo.collections.asr.modules.{module}")
    gc.freeze()
    gc.enable()
    waiting = sys.argv[2:]
    running: list[Run] = []
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            running.append(Run(waiting.pop(0)))
        for one in [one for one in running if one.has_ended()]:
            running.remove(one)
            print(json.dumps({"nemo": nemo.__file__, **one.result()}), flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
