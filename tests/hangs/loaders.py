"""Hangs of data loaders."""

from __future__ import annotations

import http.client
import socket
import threading

from group import Rank
from small_models import Speech, conformer, encode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BATCHES, AT_BATCH = 8, 4


def loader_worker(rank: Rank) -> None:
    """A worker of rank 0's data loader hangs while it has a shard open; the others wait in DDP's
    step.
    """
    shard = rank.folder / "shard_17.tar"
    shard.touch()

    class Recordings(Dataset[int]):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> int:
            if index == AT_BATCH and rank.number == 0:
                with shard.open():
                    rank.read_audio()
            return index

    batches = DataLoader(
        Recordings(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    rank.trainer().fit(Speech(), batches)


def forked_lock(rank: Rank) -> None:
    """A worker is forked while a thread of rank 1 holds a lock; in the worker, the lock is never
    released.
    """
    cache, taken, over = threading.Lock(), threading.Event(), threading.Event()

    def prefetch() -> None:
        with cache:
            taken.set()
            over.wait()

    class Cached(Dataset[int]):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> int:
            with cache:
                return index

    rank.join()
    model = DistributedDataParallel(conformer())
    for step in range(AT_BATCH):
        encode(model, step).sum().backward()
    if rank.number == 1:
        threading.Thread(target=prefetch, daemon=True).start()
        taken.wait()
    for number in DataLoader(
        Cached(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    ):
        encode(model, number).sum().backward()


def remote_audio(rank: Rank) -> None:
    """Rank 1 reads from a server without a timeout; the server accepts the connection and never
    answers.
    """

    class Streamed(Dataset[int]):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> int:
            if index == AT_BATCH and rank.number == 1:
                with socket.create_server(("127.0.0.1", 0)) as server:
                    download(server.getsockname()[1])
            return index

    rank.trainer().fit(Speech(), DataLoader(Streamed(), batch_size=None))


def download(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/audio_0017.wav")
    return connection.getresponse().read()
