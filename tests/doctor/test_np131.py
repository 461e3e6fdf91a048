"""NP131: options that NeMo's Lhotse loader refuses; tests/test_doctor_refused.py has NeMo's own
word on each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

SETS = (
    "{multi_config: true, seed: 1, shard_seed: 1, shuffle: true, a: {cuts_path: x,"
    " batch_size: 2}"
)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"shard_seed": "random"}, "shard_seed is 'random'"),
        ({"shard_seed": "null"}, "shard_seed is null"),
        ({"shard_seed": "1.5"}, "shard_seed is 1.5"),
        ({"shard_seed": "'7'"}, "shard_seed is '7'"),
        ({"seed": "abc"}, "seed is 'abc'"),
        ({"pad_min_duration": "2", "pad_direction": "up"}, "pad_direction is 'up'"),
        (
            {"truncate_duration": "2", "truncate_offset_type": "middle"},
            "truncate_offset_type is 'middle'",
        ),
        (
            {"force_map_dataset": "true", "force_iterable_dataset": "true"},
            "exclude each other",
        ),
        ({"shuffle": "null"}, "shuffle is null"),
    ],
)
def test_what_the_loader_refuses(
    tmp_path: Path, overrides: dict[str, str], said: str
) -> None:
    given = [f"++model.train_ds.{key}={value}" for key, value in overrides.items()]
    (finding,) = found(tmp_path, "NP131", LHOTSE, *given)
    assert finding.severity is WARNING and said in finding.what
    own = "++model.train_ds.use_lhotse=false"
    assert found(tmp_path, "NP131", NEST, own, *given) == []  # another loader's


def test_several_sets_are_fused_in_a_way_that_there_is_and_each_has_a_weight(
    tmp_path: Path,
) -> None:
    for more, count in {
        "}": 0,
        ", sampler_fusion: zip}": 0,
        ", sampler_fusion: mix}": 1,
        ", sampler_fusion: '???'}": 0,
        ", sampler_fusion: randomized_round_robin, sampler_weights: {a: 1}}": 0,
        ", sampler_fusion: randomized_round_robin, sampler_weights: {b: 1}}": 1,
    }.items():
        assert (
            len(found(tmp_path, "NP131", f"data: {{train_ds: {SETS}{more}}}\n"))
            == count
        ), more


def test_what_the_loader_takes(tmp_path: Path) -> None:
    assert found(tmp_path, "NP131", LHOTSE) == found(tmp_path, "NP131", NEST) == []
    for key, value in (
        ("shard_seed", "7"),
        ("seed", "trng"),
        ("pad_direction", "up"),
        ("shuffle", "'???'"),
    ):
        assert found(tmp_path, "NP131", LHOTSE, f"++model.train_ds.{key}={value}") == []
