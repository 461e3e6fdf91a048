"""No rank leaves an agreement alone: in no order does one go on as stock, in a barrier of NeMo's,
while another waits for it in our round without limit.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from ranks import Said, run_ranks

LIMIT_S = 60.0  # a scenario that hangs


def asks(rank: int, size: int, hasty: int, late: tuple[int, ...]) -> Any:
    """Late ranks say their first word after a hasty one's deadline, and before the others'."""
    import torch.distributed as dist

    from nemo_patches.options.checkpoints import Checkpoints
    from nemo_patches.sync import length_sync
    from nemo_patches.sync.settings import Settings

    timeout = timedelta(seconds=1 if rank == hasty else 50)
    length_sync.use(Settings(timeout=timeout))
    said, checkpoints = Said(), Checkpoints()
    store = dist.distributed_c10d._get_default_store()
    length_sync.process.present_group()
    if rank in late:
        store.wait(["hasty"], timedelta(seconds=LIMIT_S))
    checkpoints.begin()
    own = checkpoints.answer("save", rank, 1)
    if rank == hasty:
        store.set("hasty", "")
    dist.barrier()  # NeMo's
    return own, checkpoints.answer("save", rank, 2), said.lines


@pytest.mark.parametrize(
    ("size", "hasty", "late"),
    [(3, 0, (2,)), (3, 1, (2,)), (3, 1, (0,)), (8, 3, (0, 5, 7))],
)
def test_a_first_word_between_two_deadlines_is_as_stock_on_all_ranks(
    size: int, hasty: int, late: tuple[int, ...]
) -> None:
    for rank, result in enumerate(run_ranks(asks, size, hasty, late, limit=LIMIT_S)):
        first, second, lines = result.value
        assert (first, second) == (rank, rank)
        (line,) = [line for line in lines if "as in stock NeMo" in line]
        assert f"not every rank takes part, as rank {hasty} has found" in line


def errs(rank: int, size: int) -> Any:
    """Rank 1 alone has an error of ours: in a length sync, then in a checkpoint, then it drops a
    loader that the others wait for.
    """
    import torch.distributed as dist

    from nemo_patches.options.agreement import StopTogetherError
    from nemo_patches.options.checkpoints import Checkpoints
    from nemo_patches.options.even_loader import even_loaders
    from nemo_patches.sync import length_sync
    from nemo_patches.sync.settings import Settings

    length_sync.use(Settings(timeout=timedelta(seconds=50)))
    said, checkpoints = Said(), Checkpoints()
    seen: dict[str, Any] = {}
    if rank == 1:
        length_sync.process.synced_length(object(), 5)  # type: ignore[arg-type]
    checkpoints.begin()
    seen["after the length sync's"] = checkpoints.answer("save", rank, 1)
    own: Any = object() if rank == 1 else rank  # nothing that JSON has
    given = checkpoints.safely(lambda: checkpoints.answer("save", own, 2), own)
    seen["after its own"] = given is own
    dist.barrier()  # NeMo's
    seen["then"] = checkpoints.answer("save", rank, 3)
    loader: Any = even_loaders.make([10, 11, 12][: rank + 1], "data", may_be_empty=True)
    seen["passes"] = list(loader)
    loader = even_loaders.make([10, 11], "data")
    if rank == 1:
        del loader
        dist.barrier()
    else:
        with pytest.raises(StopTogetherError) as raised:
            list(loader)
        seen["dropped"] = str(raised.value)
        dist.barrier()
    return seen, said.lines


def test_after_an_error_of_ours_on_one_rank_no_other_waits_for_it() -> None:
    results = run_ranks(errs, 3, limit=LIMIT_S)
    for rank, result in enumerate(results):
        seen, lines = result.value
        assert seen["after the length sync's"] == 0, "rank 0's"
        assert seen["after its own"] and seen["then"] == rank
        (line,) = [line for line in lines if "as in stock NeMo" in line]
        reason = "please report it" if rank == 1 else "rank 1 takes part no more"
        assert reason in line
        assert seen["passes"] == [10]
        if rank != 1:
            assert "rank 1 takes part no more" in seen["dropped"]


def breaks(rank: int, size: int) -> Any:
    """The exchange of rank 1 ends by an error of its own, in the middle of a training."""
    import torch.distributed as dist

    from nemo_patches.options.checkpoints import CheckpointError, Checkpoints

    checkpoints = Checkpoints()
    rank_zero = checkpoints.begin()
    assert rank_zero is not None and checkpoints.answer("save", rank, 1) == 0
    dist.barrier()
    exchange = rank_zero._exchange
    if rank == 1:
        exchange.post(lambda: 1 / 0)
    try:
        checkpoints.answer("save", rank, 2)
    except CheckpointError as error:
        return str(error)
    return "as stock"


def test_where_the_exchange_itself_breaks_no_rank_waits() -> None:
    for result in run_ranks(breaks, 3, limit=LIMIT_S):
        assert result.value == "as stock" or "cannot agree any more" in result.value
