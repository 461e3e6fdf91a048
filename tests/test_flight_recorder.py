"""Flight Recorder dumps, real ones of torch's and made ones: who has not entered a collective; and
hostile pickles.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreters import python

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import plain_pickle
from nemo_patches.tools.diagnose.findings import NOT_ENOUGH, Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import Evidence
from nemo_patches.tools.diagnose.sources import flight_recorder as fr

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

RANKS = 4
FRAMES = [
    {
        "name": "all_reduce",
        "filename": "/env/lib/python3.11/site-packages/torch/distributed/x.py",
        "line": 7,
    },
    {"name": "training_step", "filename": "/home/u/asr/train.py", "line": 41},
]


def read(folder: Path) -> Evidence:
    evidence = Evidence()
    fr.read(sorted(file for file in folder.iterdir() if file.is_file()), evidence)
    return evidence


def diagnose_dumps(folder: Path) -> Diagnosis:
    return judge(read(folder))


def entry(
    number: int, name: str = "nccl:all_reduce", size: int = 1, state: str = "completed"
) -> dict[str, Any]:
    return {
        "frames": FRAMES,
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[size]],
        "state": state,
        "time_discovered_completed_ns": 5 if state == "completed" else None,
        "retired": state == "completed",
        "is_p2p": False,
    }


def of_groups(
    folder: Path, dumps: dict[int, tuple[dict[str, list[int]], list[dict[str, Any]]]]
) -> Path:
    """For each rank the groups that it is in, and its entries."""
    for rank, (groups, entries) in dumps.items():
        configs = {name: {"ranks": str(ranks)} for name, ranks in groups.items()}
        content = {"version": "2.10", "pg_config": configs, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(content, protocol=2)
        )
    return folder


def write(
    folder: Path, entries: dict[int, list[dict[str, Any]]], as_json: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, of_rank in entries.items():
        content = {
            "version": "2.10",
            "pg_config": {"": {"ranks": str(list(range(RANKS)))}},
            "entries": of_rank,
        }
        file = folder / f"nccl_trace_rank_{rank}"
        file.write_bytes(
            json.dumps(content).encode()
            if as_json
            else pickle.dumps(content, protocol=2)
        )
    return folder


def steps(last: int, **changes: Any) -> list[dict[str, Any]]:
    """Collectives 1 to `last`, all but the last completed."""
    return [
        *(entry(number) for number in range(1, last)),
        entry(last, **{"state": "started", **changes}),
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_has_not_entered_is_named_with_what_it_did_last(
    as_json: bool, tmp_path: Path
) -> None:
    done = [entry(number) for number in range(1, 7)]
    folder = write(
        tmp_path / "dumps", {0: steps(7), 1: steps(7), 2: done, 3: steps(7)}, as_json
    )
    report = diagnose_dumps(folder)
    first = report.findings[0]
    assert (first.id, first.ranks, report.exit_code, report.world_size) == (
        ids.MISSING_RANK,
        (2,),
        1,
        RANKS,
    )
    assert "[1], number 7 of group 0" in report.verdict
    assert first.evidence[0].startswith("rank 2 [nccl_trace_rank_2]")


@pytest.mark.parametrize(
    "name", ["rank{}_step42.pickle", "dump-rank{}.pkl.1", "fr_{}.pickle"]
)
def test_dumps_with_other_names_and_of_nccl2(name: str, tmp_path: Path) -> None:
    """nccl2 is torch 2.15's default backend."""
    done = [entry(number, "nccl2:all_reduce") for number in range(1, 7)]
    going = [*done, entry(7, "nccl2:all_reduce", state="started")]
    folder = write(tmp_path / "dumps", {0: going, 1: going, 2: done, 3: going})
    for rank in range(RANKS):
        (folder / f"nccl_trace_rank_{rank}").rename(folder / name.format(rank))
    first = diagnose_dumps(folder).findings[0]
    assert (first.id, first.ranks) == (ids.MISSING_RANK, (2,)), first


@pytest.mark.parametrize(
    ("odd", "finding"),
    [
        ({"name": "nccl:broadcast", "size": 1}, ids.OUT_OF_STEP),
        ({"size": 9}, ids.SIZES),
    ],
)
def test_collectives_that_are_not_alike_accuse_nobody(
    odd: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    folder = write(
        tmp_path / "dumps",
        {rank: steps(7, **(odd if rank == 2 else {})) for rank in range(RANKS)},
    )
    first = diagnose_dumps(folder).findings[0]
    assert (first.id, first.ranks) == (finding, ())
    assert "rank 2" in first.text


def test_where_all_have_entered_none_is_missing(tmp_path: Path) -> None:
    first = diagnose_dumps(
        write(tmp_path / "dumps", {rank: steps(7) for rank in range(RANKS)})
    ).findings[0]
    assert (first.id, first.ranks) == (ids.ALL_IN, ())


def test_dumps_of_different_moments_and_dumps_that_are_not_there_accuse_nobody(
    tmp_path: Path,
) -> None:
    """A collective that is complete had every rank in it: that rank's dump is older. A healthy
    job's dumps are such.
    """
    later = [entry(number) for number in range(1, 9)]
    report = diagnose_dumps(
        write(tmp_path / "older", {0: later, 1: later[:5], 2: later, 3: later})
    )
    assert ([one.id for one in report.findings], report.exit_code) == ([NOT_ENOUGH], 2)
    report = diagnose_dumps(
        write(tmp_path / "gone", {rank: steps(7) for rank in (0, 1, 3)})
    )
    assert [(one.id, one.ranks) for one in report.findings] == [
        (ids.ALL_IN, ()),
        (ids.NOT_SEEN, ()),
    ]
    assert (
        "No rank is missing" not in report.next_step
        and "may be missing" in report.verdict
    )


ALL = list(range(RANKS))


def in_group(name: str, number: int, state: str = "started") -> dict[str, Any]:
    return entry(number, state=state) | {"process_group": (name, "tp")}


def test_who_waits_in_a_collective_of_another_group_is_not_missing(
    tmp_path: Path,
) -> None:
    first, second = {"0": ALL, "1": [0, 1]}, {"0": ALL, "2": [2, 3]}
    waits = (second, steps(2))
    # Rank 0 waits for rank 1 in group 1, of which rank 1 has entered nothing; the others wait for
    # both in group 0.
    of_groups(
        tmp_path,
        {
            0: (first, [entry(1), in_group("1", 1)]),
            1: (first, [entry(1)]),
            2: waits,
            3: waits,
        },
    )
    found = diagnose_dumps(tmp_path).findings[0]
    assert (found.id, found.ranks) == (ids.MISSING_RANK, (1,)), found
    # Ranks 0 and 1 wait for each other.
    of_groups(
        tmp_path, {0: (first, steps(2)), 1: (first, [entry(1), in_group("1", 1)])}
    )
    found = diagnose_dumps(tmp_path).findings[0]
    assert (found.id, found.ranks) == (ids.CROSSED, ())
    # Rank 0 waits for rank 1, of which there is no dump.
    (tmp_path / "nccl_trace_rank_1").unlink()
    of_groups(tmp_path, {0: (first, [entry(1), in_group("1", 1)])})
    found = diagnose_dumps(tmp_path).findings[0]
    assert (found.id, found.ranks) == (
        ids.CROSSED,
        (),
    ) and "rank 0, which has not" in found.text


def test_groups_of_other_ranks_may_have_the_same_name(tmp_path: Path) -> None:
    both = [in_group("1", 1, "completed"), in_group("1", 2)]
    left, right = {"1": [0, 1]}, {"1": [2, 3]}
    of_groups(
        tmp_path,
        {0: (left, both), 1: (left, both), 2: (right, both[:1]), 3: (right, both[:1])},
    )
    found = diagnose_dumps(tmp_path).findings
    assert [(one.id, one.ranks) for one in found] == [
        (ids.ALL_IN, ())
    ] and "All 2 ranks" in found[0].text


def test_a_ring_that_has_lost_all_of_a_group_tells_nothing_of_it(
    tmp_path: Path,
) -> None:
    """Rank 3 is in the second collective of group 0, as ranks 0 and 2 are, and has gone on in group
    2.
    """
    later = [in_group("2", number, "completed") for number in range(3, 9)]
    tp: dict[str, list[int]] = {"0": ALL, "2": [2, 3]}
    of_groups(
        tmp_path,
        {
            0: (tp, steps(2)),
            1: (tp, steps(1, state="completed")),
            2: (tp, [*steps(2), *later]),
        },
    )
    of_groups(tmp_path, {3: (tp, later)})
    assert [(one.id, one.ranks) for one in diagnose_dumps(tmp_path).findings] == [
        (ids.MISSING_RANK, (1,))
    ]


def test_not_all_ranks_have_entered_where_one_has_no_dump(tmp_path: Path) -> None:
    of_groups(tmp_path, {rank: ({"0": ALL}, steps(2)) for rank in (0, 1, 3)})
    first, second = diagnose_dumps(tmp_path).findings
    assert (
        "All 3 ranks have entered" in first.text
        and "Nothing is known of rank 2" in first.text
    )
    assert (first.ranks, second.id, second.ranks) == (
        (),
        ids.NOT_SEEN,
        (),
    ) and "rank 2" in second.text


def test_rings_that_have_lost_their_beginning_are_compared_from_where_all_have_begun(
    tmp_path: Path,
) -> None:
    entries = {rank: steps(90)[20 * rank :] for rank in range(RANKS)}
    entries[2] = entries[2][:-1]
    first = diagnose_dumps(write(tmp_path / "dumps", entries)).findings[0]
    assert (first.id, first.ranks) == (ids.MISSING_RANK, (2,))


def test_who_is_in_a_collective_that_has_ended_for_nobody_is_not_missing_from_the_next(
    tmp_path: Path,
) -> None:
    """On a GPU the host runs ahead: all are in number 6, and some have enqueued number 7 as well."""
    in_six = [entry(6, state="started")]
    done = [entry(number) for number in range(1, 6)]
    ahead = [*done, *in_six, entry(7, state="scheduled")]
    report = diagnose_dumps(
        write(tmp_path / "all_in", {0: ahead, 1: ahead, 2: [*done, *in_six], 3: ahead})
    )
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.SKIPPED, ())
    assert "[1], number 6 of group 0" in report.verdict
    # For the others number 6 has ended: rank 2's dump only tells so late.
    past = [*done, entry(6), entry(7, state="started")]
    report = diagnose_dumps(
        write(tmp_path / "missing", {0: past, 1: past, 2: [*done, *in_six], 3: past})
    )
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.MISSING_RANK, (2,))


HOSTILE = {
    "calls a function": b"cos\nsystem\n(S'touch {mark}'\ntR.",
    "calls one, protocol 4": (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch {mark}\x85R."
    ),
    "an instance": b"(ios\nsystem\n.",
    "an object": b"(cos\nsystem\nS'touch {mark}'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "builds": b"\x80\x02}}b.",
    "no end": b"\x80\x02]",
    "an empty stack": b"\x80\x02a.",
    "a key that cannot be one": b"\x80\x02}]K\x01s.",
    "not a list": b"\x80\x02}K\x01a.",
    "a mark too few": b"\x80\x02]e.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_runs(
    name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    data = HOSTILE[name].replace(b"{mark}", str(mark).encode())
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.load(data)
    (tmp_path / "trace_0").write_bytes(data)
    evidence = read(tmp_path)
    assert (evidence.facts, len(evidence.problems)) == ([], 1)
    assert not mark.exists()


def test_shared_and_endless_structures_are_read_in_bounded_steps(
    tmp_path: Path,
) -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(60):  # 2 ** 60 of them, if somebody goes through all
        laughs = [laughs, laughs]
    endless: list[Any] = []
    endless.append(endless)
    for odd in (laughs, endless):
        entries = {
            0: [
                *steps(3),
                odd,
                {"process_group": odd, "collective_seq_id": 3, "frames": odd},
            ],
            1: steps(3),
        }
        entries[0].append({**entry(3), "input_sizes": odd, "frames": [{"name": odd}]})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        assert diagnose_dumps(write(folder, entries)).findings
    deep = b"[" * 200_000
    (tmp_path / "0" / "trace_5").write_bytes(deep)
    assert any(
        "trace_5" in problem for problem in diagnose_dumps(tmp_path / "0").problems
    )


plain: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=plain, protocol=st.integers(0, 5))
def test_plain_data_come_out_as_they_went_in(value: Any, protocol: int) -> None:
    assert plain_pickle.load(pickle.dumps(value, protocol)) == value


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_the_bytes_are_it_is_refused_or_plain(data: st.DataObject) -> None:
    content = bytearray(
        pickle.dumps(
            {"entries": [entry(1)], "x": [1.5, (2, 3)]},
            protocol=data.draw(st.integers(0, 5)),
        )
    )
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.integers(0, 255)
        )
    try:
        plain_pickle.load(bytes(content))
    except plain_pickle.NotPlainError as error:
        assert str(error)


REAL = """
import datetime, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
if not hasattr(c10d, "_dump_fr_trace"):
    sys.exit(77)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=2))
def training_step():
    dist.all_reduce(torch.ones(3))
for _ in range(3):
    training_step()
dist.broadcast(torch.ones(5), 0)
if rank == 0:
    try:
        training_step()
    except RuntimeError:
        pass
else:
    while not (folder / "gloo_trace_0").exists():
        time.sleep(0.05)
(folder / f"part{rank}").write_bytes(c10d._dump_fr_trace())
(folder / f"part{rank}").rename(folder / f"gloo_trace_{rank}")
os._exit(0)
"""


@pytest.mark.installed
def test_real_dumps_of_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import sys

    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "200"}
    command = [sys.executable, "-c", REAL]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    codes = [rank.wait(200) for rank in ranks]
    if 77 in codes or not fr.recognises(
        "gloo_trace_0", (tmp_path / "gloo_trace_0").read_bytes()[:4096]
    ):
        pytest.skip("this torch records no collectives of Gloo")
    assert {name for name, *_ in _opcodes(tmp_path / "gloo_trace_0")} >= {
        "PROTO",
        "SETITEMS",
        "STOP",
    }
    (tmp_path / "store").unlink(missing_ok=True)
    done = python("-m", "nemo_patches", "diagnose", str(tmp_path), "--json")
    report = json.loads(done.stdout)
    if report["findings"][0]["id"] == NOT_ENOUGH:
        pytest.skip("this torch records no collectives of Gloo")
    assert (report["findings"][0]["id"], report["findings"][0]["ranks"]) == (
        ids.MISSING_RANK,
        [1],
    )
    assert "gloo:all_reduce [3], number 5" in report["verdict"]
    assert "gloo:broadcast [5], number 4" in report["findings"][0]["evidence"][0]


def _opcodes(file: Path) -> list[tuple[str]]:
    return [(opcode.name,) for opcode, _, _ in pickletools.genops(file.read_bytes())]


THEIRS = """
import sys
from torch.distributed.flight_recorder.fr_trace import main
for folder in sys.argv[1:]:
    print("of", folder, file=sys.stderr)
    main([folder, "-p", "nccl_trace_rank_"])
"""


@pytest.mark.installed
def test_torchs_own_analyser_names_the_same_ranks(tmp_path: Path) -> None:
    """Of dumps as NCCL's recorder writes them; on Gloo's it fails. Healthy dumps of different
    moments it accuses.
    """
    pytest.importorskip("torch")
    cases = {"none": (), "one": (2,), "two": (1, 3)}
    for name, missing in cases.items():
        entries = {
            rank: steps(7) if rank not in missing else [entry(n) for n in range(1, 7)]
            for rank in range(RANKS)
        }
        write(tmp_path / name, entries)
        # It wants more than the reader here does.
        for file in (tmp_path / name).iterdir():
            content = pickle.loads(file.read_bytes())
            more = {
                "pg_id": 0,
                "p2p_seq_id": 0,
                "time_created_ns": 1,
                "duration_ms": None,
                "timeout_ms": 600_000,
            }
            more |= {
                "input_dtypes": ["Float"],
                "output_dtypes": ["Float"],
                "time_discovered_started_ns": 2,
            }
            content["entries"] = [
                {
                    **one,
                    **more,
                    "op_id": one["record_id"],
                    "output_sizes": one["input_sizes"],
                }
                for one in content["entries"]
            ]
            group = {
                "name": "0",
                "desc": "default_pg",
                "ranks": str(list(range(RANKS))),
            }
            content |= {
                "nccl_version": "2.21.5",
                "pg_config": {"0": group},
                "pg_status": {},
            }
            file.write_bytes(pickle.dumps(content, protocol=2))
    theirs = python("-c", THEIRS, *(str(tmp_path / name) for name in cases))
    if theirs.returncode:
        pytest.skip(
            "this torch has no analyser, or it does not take these dumps:"
            f" {theirs.stderr[-200:]}"
        )
    said = theirs.stderr.split("of " + str(tmp_path))[1:]
    named_by_torch = [
        tuple(
            map(
                int,
                re.findall(r"\d+", one.partition("missing ranks: {")[2].split("}")[0]),
            )
        )
        for one in said
    ]
    ours = [diagnose_dumps(tmp_path / name).findings[0].ranks for name in cases]
    assert ours == named_by_torch == list(cases.values())


def test_a_stall_report_with_a_dump_within_is_no_dump() -> None:
    within = b'{"rank": 0, "flight_recorder": {"comm_lib_version": "", "entries": ['
    assert not fr.recognises("stall_rank_0.json", within)
    assert fr.recognises("rank_0.json", b'{"comm_lib_version": "", "en')
