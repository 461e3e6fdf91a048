"""What is said of ranks whose parameters differ: as much as their accounts prove, and what is a guess is called one."""

from __future__ import annotations

import pytest

from nemo_patches.uneven.parted import Account, judged

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def said(checksums: list[int], batches: list[int] | None = None, first: str = "w", equal_at: int = 2000) -> str:
    counts = batches or [3000] * len(checksums)
    accounts = [Account(3000, count + 1, 7, one) for one, count in zip(checksums, counts, strict=True)]
    found = judged(accounts, "AdamW", first, equal_at)
    return found.text if found is not None else ""


def test_ranks_that_are_equal_are_not_spoken_of() -> None:
    assert said([5, 5, 5]) == ""


def test_most_ranks_accuse_the_others_in_words_of_a_guess() -> None:
    text = said([5, 5, 5, 5, 5, 6, 5, 5])
    assert text == (
        "after optimizer step 3000 (AdamW) the parameters of rank 5 differ from those of the other 7 ranks, first in "
        "w. Training goes on; they were equal after step 2000: go on from a checkpoint of then. A guess, as most ranks "
        "agree: a skipped step, another learning rate or config, or gradients that were not synchronized, on rank 5"
    )
    assert "the parameters of ranks 1-2 differ from those of the other 3 ranks, first" in said([5, 6, 6, 5, 5])
    assert "of ranks 1-2 differ from those of the other 3 ranks, and among themselves, first" in said([5, 6, 7, 5, 5])


def test_without_a_majority_nobody_is_accused() -> None:
    assert "the parameters of ranks 0 and 1 differ, first in w" in said([5, 6])
    assert "Which of them is wrong cannot be told; possible:" in said([5, 6])
    text = said([5, 5, 6, 6], equal_at=0)
    assert "the parameters differ between ranks 0-1 and ranks 2-3, first in w. Training goes on; compare" in text
    assert "Which are wrong cannot be told" in text
    assert "rank 3 and 4 more versions" in said([1, 2, 3, 4, 5, 6, 7, 8])


def test_numbers_of_batches_are_told_where_all_are_known() -> None:
    text = said([5, 5, 5], [3000, 4000, 3000])
    assert "the parameters are equal, but the ranks have taken different numbers of training batches" in text
    assert "(3,000 on ranks 0, 2; 4,000 on rank 1)" in text
    assert "(3,000 on ranks 0, 2; 3,001 on rank 1)" in said([5, 6, 5], [3000, 3001, 3000])
    assert said([5, 5, 5], [3000, -1, 3000]) == ""


def test_what_cannot_be_compared_is_no_difference() -> None:
    accounts = [Account(5, 0, 7, 1), Account(5, 0, 0, 2), Account(5, 0, 7, 1)]
    found = judged(accounts, "AdamW", "", 0)
    assert found is not None
    assert found.text == "AdamW: parameters are not compared: rank 1 cannot, and says why"
    found = judged([Account(5, 0, 7, 1), Account(5, 0, 7, 1), Account(5, 0, 8, 2)], "AdamW", "", 0)
    assert found is not None
    assert "have different ones, by name or shape (ranks 0-1; rank 2): they are sharded, as by ZeRO" in found.text
