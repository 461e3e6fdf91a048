"""Whatever values a config has, no rule fails on it, and every safe change either does what it says
or is refused.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import LHOTSE, NEST
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, fixes, yaml_text
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.refused import DoctorError

pytestmark = pytest.mark.one_nemo

KEYS = re.findall(
    r"\w+",
    """
    model trainer exp_manager encoder preprocessor joint train_ds validation_ds test_ds datasets multi_config defaults
    max_duration devices num_nodes strategy timeout pos_emb_max_len window_stride n_window_stride hop_length pad_to
    sync_max_audio_length augmentor speed silence batch_size batch_duration bucket_batch_size bucket_duration_bins
    tarred_audio_filepaths is_tarred input_cfg manifest_filepath shar_path use_lhotse fused_batch_size fuse_loss_wer
    num_workers pin_memory drop_last limit_train_batches limit_val_batches accelerator sync_batchnorm conv_norm_type
    sample_rate force_finite random_padding concatenate_samples concatenate_duration_factor _target_
    """,
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70000),
    st.sampled_from([10**400, float("nan"), float("inf"), -1.5, 1e308]),
    st.sampled_from(
        [
            "",
            "x",
            "???",
            "${nope}",
            "${model}",
            "${oc.env:X}",
            "0,1",
            "4",
            "auto",
            "ddp",
            "a_{0..9}.tar",
        ]
    ),
    st.sampled_from(
        [
            [],
            [1],
            [[]],
            [["a.tar"], ["b.tar"]],
            [None],
            [{"type": 5}],
            [{"type": "shar", "input_cfg": 5}],
        ]
    ),
    st.sampled_from(
        [
            {},
            {"prob": 1},
            {"_target_": 5},
            {"_target_": "datetime.timedelta", "seconds": "x"},
            {1: 2},
        ]
    ),
)


def places(tree: Any) -> list[dict[Any, Any]]:
    children = (
        tree.values()
        if isinstance(tree, dict)
        else tree
        if isinstance(tree, list)
        else []
    )
    return [
        *([tree] if isinstance(tree, dict) else []),
        *(place for child in children for place in places(child)),
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([NEST, LHOTSE]),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from(KEYS), VALUES), max_size=6),
)
def test_no_value_of_any_kind_makes_a_rule_fail(
    text: str, changes: list[tuple[int, str, Any]]
) -> None:
    tree = yaml.safe_load(text)
    for place, key, value in changes:
        found = places(tree)
        found[place % len(found)][key] = copy.deepcopy(value)
    source = yaml_text.parse(Path("config.yaml"), yaml.safe_dump(tree))
    try:
        config = reading.with_overrides(source)
    except (
        DoctorError
    ):  # refused, with the reason: `defaults: [1]` is another file's name
        return
    done = examination.checked(Job(config), examination.chosen())
    assert not [
        finding.what for rule, finding in done if rule.identifier == examination.CRASHED
    ]
    assert Job(config).headline
    for _, finding in done:
        if finding.change is not None:
            after, refused = fixes.fixed(config, [finding.change])
            assert refused or after != config.source.text
