"""What the doctor says of Lhotse's inputs, against NeMo's own registry and loaders: the ids that
two ranks get.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import soundfile
from ranks import run_ranks

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, yaml_text
from nemo_patches.tools.doctor.finding import RuleFinding, Severity
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

# Each entry is in a file of its own, so that an order of files is one of entries.
ENTRIES, BATCH = 24, 2
# Some minutes; what is marked matrix runs on every series.
pytestmark = pytest.mark.one_nemo
FIRST = 6  # batches that are compared
MOST = 30  # batches that are read: more than any finite set here has
COMMON = {
    "batch_size": BATCH,
    "shuffle": True,
    "sample_rate": 16000,
    "seed": 0,
    "num_workers": 0,
}
COMMON |= {"shuffle_buffer_size": ENTRIES // 2}

CONVERSATION = {"audio_locator_tag": "[audio]", "token_equivalent_duration": 0.08}
FILES = "_OP_0..23_CL_"
TARS = {"tarred_audio_filepaths": f"FOLDER/audio_{FILES}.tar"}
PLAIN = {"manifest_filepath": "FOLDER/plain.json"}
TARRED = {"manifest_filepath": f"FOLDER/manifest_{FILES}.json", **TARS}
CUTS, SHAR = {"cuts_path": "FOLDER/cuts.jsonl"}, {"shar_path": "FOLDER/shar"}
TEXTS, TABLES = (
    f"FOLDER/text_{FILES}.txt",
    [f"FOLDER/table_{number}.parquet" for number in range(ENTRIES)],
)
CHATS = {"manifest_filepath": f"FOLDER/chat_{FILES}.jsonl", **CONVERSATION}
SHARES = {
    "manifest_filepath": f"FOLDER/share_{FILES}.jsonl",
    "audio_placeholders": ["<sound>"],
    **CONVERSATION,
}

# Every type with each kind of input that it can have: what docs/doctor.md calls it, and the entry's
# keys.
TYPES: list[tuple[str, str, dict[str, Any]]] = [
    ("txt", "", {"paths": TEXTS, "language": "en"}),
    (
        "txt_pair",
        "",
        {
            "source_paths": TEXTS,
            "target_paths": TEXTS,
            "source_language": "en",
            "target_language": "en",
        },
    ),
    ("txt_jsonl", "", {"paths": f"{TEXTS[:-3]}jsonl", "language": "en"}),
    ("nemo_sft_jsonl", "", {"paths": f"FOLDER/sft_{FILES}.jsonl", "language": "en"}),
    ("multimodal_conversation", "", CHATS),
    ("multimodal_conversation", "tarred_audio_filepaths", {**CHATS, **TARS}),
    ("share_gpt", "", SHARES),
    ("share_gpt", "tarred_audio_filepaths", {**SHARES, **TARS}),
    ("share_gpt_webdataset", "", {"data_dir": "FOLDER/pairs", **CONVERSATION}),
    ("parquet", "", {"manifest_filepath": TABLES}),
    *((name, "", PLAIN) for name in ("nemo", "nemo_tarred", "nemo_tarred_to_duplex")),
    *(
        (name, "tarred_audio_filepaths", TARRED)
        for name in ("nemo", "nemo_tarred", "nemo_tarred_to_duplex")
    ),
    *((name, "", CUTS) for name in ("lhotse", "lhotse_shar")),
    *((name, "shar_path", SHAR) for name in ("lhotse", "lhotse_shar")),
    *(
        (name, keys, {**entry, **CONVERSATION})
        for name in (
            "lhotse_as_conversation",
            "s2s_as_conversation",
            "sqa_as_conversation",
            "s2s_duplex_overlap_as_s2s_duplex",
            "s2s_duplex_reverse_role",
            "lhotse_magpietts_data_as_continuation",
        )
        for keys, entry in (("", CUTS), ("shar_path", SHAR))
    ),
]
# By its name: how the doctor has it read, and the first series that has it.
KNOWN_TYPES = TABLE["types_of_inputs"]
TYPE_NAMES = [f"{name} {keys}".strip() for name, keys, _ in TYPES]
STREAMS = [
    name
    for name, (data_type, keys, _) in zip(TYPE_NAMES, TYPES, strict=True)
    if keys or KNOWN_TYPES[data_type][0] == "STREAM"
]
SEEDS: dict[str, dict[str, Any]] = {
    "a whole number": {"shard_seed": 42},
    "trng": {"shard_seed": "trng"},
    "randomized, 0 workers": {"shard_seed": "randomized"},
    "randomized, 1 worker": {"shard_seed": "randomized", "num_workers": 1},
}


def entry(name: str, **more: Any) -> dict[str, Any]:
    """One of input_cfg, by its name in TYPE_NAMES."""
    data_type, _, given = TYPES[TYPE_NAMES.index(name)]
    return {"type": data_type, **given, **more}


TARRED_ENTRY, SHAR_ENTRY = (
    entry("nemo_tarred tarred_audio_filepaths"),
    entry("lhotse_shar shar_path"),
)
PLAIN_ENTRY, CUTS_ENTRY, TEXT_ENTRY = entry("nemo"), entry("lhotse"), entry("txt")
ONE_FILE = {"type": "txt", "paths": "FOLDER/text.txt", "language": "en"}
WHOLE, TRNG, IN_ORDER = {"shard_seed": 42}, {"shard_seed": "trng"}, {"shuffle": False}
ONCE = {"force_finite": True, "force_map_dataset": True}


def of(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input_cfg": list(entries), **more}


# One of each kind of stream, and of what is none: the others of a kind are read by the same code.
KINDS = ["txt", "nemo_tarred tarred_audio_filepaths", "lhotse_shar shar_path"]
WITH_ALL_SEEDS = [*KINDS, "nemo", "lhotse"]
BY_TYPE = {
    (name, seed): of(entry(name), **given)
    for name in TYPE_NAMES
    for seed, given in SEEDS.items()
    if name in WITH_ALL_SEEDS or not seed.startswith("randomized")
}
OTHERS: dict[str, dict[str, Any]] = {
    **{f"{name}, in order": of(entry(name), **TRNG, **IN_ORDER) for name in KINDS},
    **{
        f"{name}, forced, {how}": of(entry(name), **ONCE, **given)
        for name in KINDS
        for how, given in {
            "42": WHOLE,
            "trng": TRNG,
            "trng in order": {**TRNG, **IN_ORDER},
        }.items()
    },
    # A type made the other kind: each worker reads all of what is no stream, or ranks share what
    # never ends.
    "plain as a stream": {**PLAIN, **WHOLE, "force_iterable_dataset": True},
    "plain as a stream, trng": {**PLAIN, **TRNG, "force_iterable_dataset": True},
    "plain as a stream, 2 workers": {
        **PLAIN,
        **TRNG,
        "force_iterable_dataset": True,
        "num_workers": 2,
    },
    "tar files as no stream": {**TARRED, **WHOLE, "force_map_dataset": True},
    "texts as no stream": of(TEXT_ENTRY, **TRNG, force_map_dataset=True),
    "forced in the entry only": of({**TEXT_ENTRY, "force_map_dataset": True}, **WHOLE),
    # Several inputs
    **{
        f"{kind}, {seed}": {**several, "shard_seed": seed}
        for seed in (42, "trng")
        for kind, several in {
            "two streams": of(TEXT_ENTRY, TARRED_ENTRY),
            "two streams in order": of(TEXT_ENTRY, TARRED_ENTRY, **IN_ORDER),
            "two plain ones": of(PLAIN_ENTRY, CUTS_ENTRY),
            "two plain ones, finite": of(PLAIN_ENTRY, CUTS_ENTRY, force_finite=True),
            "two plain ones in order, finite": of(
                PLAIN_ENTRY, CUTS_ENTRY, force_finite=True, **IN_ORDER
            ),
            "two plain ones, for their metadata": of(
                PLAIN_ENTRY, CUTS_ENTRY, metadata_only=True
            ),
            "both kinds, as no stream": of(
                TARRED_ENTRY, PLAIN_ENTRY, force_map_dataset=True
            ),
            "both kinds, as a stream": of(
                TARRED_ENTRY, PLAIN_ENTRY, force_iterable_dataset=True
            ),
            "both kinds, each once": of(TARRED_ENTRY, PLAIN_ENTRY, **ONCE),
            "a list of manifests": {
                "manifest_filepath": [["FOLDER/plain.json"], ["FOLDER/plain.json"]]
            },
            "a list of one manifest": {"manifest_filepath": [["FOLDER/plain.json"]]},
            "a list of Shar": {"shar_path": ["FOLDER/shar", "FOLDER/shar"]},
            "a list of Shar, finite": {
                "shar_path": ["FOLDER/shar", "FOLDER/shar"],
                "force_finite": True,
            },
        }.items()
    },
    "both kinds in a group whose switch counts for its entries": of(
        {
            "type": "group",
            "force_map_dataset": True,
            "input_cfg": [TARRED_ENTRY, PLAIN_ENTRY],
        },
        **WHOLE,
    ),
    # Entries that say otherwise than their set
    **{
        f"{name} with {inner}, in a set with {outer}": of(
            {**given, "shard_seed": inner}, shard_seed=outer
        )
        for name, given in {
            "tar files": TARRED_ENTRY,
            "Shar": SHAR_ENTRY,
            "one text": ONE_FILE,
            "plain": PLAIN_ENTRY,
        }.items()
        for inner, outer in ((42, "trng"), ("trng", 42))
    },
    "42, shuffled in the entry only": of(
        {**TARRED_ENTRY, **WHOLE, "shuffle": True}, **TRNG, **IN_ORDER
    ),
    "trng, shuffled in the entry only": of(
        {**TARRED_ENTRY, **TRNG, "shuffle": True}, **WHOLE, **IN_ORDER
    ),
    "a group with 42": of(
        {"type": "group", **WHOLE, "input_cfg": [TEXT_ENTRY, TARRED_ENTRY]},
        **TRNG,
        **IN_ORDER,
    ),
    "a group with trng": of(
        {"type": "group", **TRNG, "input_cfg": [TEXT_ENTRY, TARRED_ENTRY]}, **WHOLE
    ),
    "an entry that ends": of({**TARRED_ENTRY, "force_finite": True}, **WHOLE),
    "an entry that does not end": of(
        {**TEXT_ENTRY, "force_finite": False}, **WHOLE, force_finite=True
    ),
    "two entries that end": of(
        *([{**TARRED_ENTRY, "force_finite": True}] * 2), **WHOLE
    ),
    "texts for their metadata": of(TEXT_ENTRY, **WHOLE, metadata_only=True),
    "tar files for their metadata": of(TARRED_ENTRY, **WHOLE, metadata_only=True),
    "Shar for its metadata": of(SHAR_ENTRY, **WHOLE, metadata_only=True),
    # What counts of several keys
    "cuts beside tar files": {**CUTS, **TARRED, **WHOLE},
    "entries beside tar files": of(PLAIN_ENTRY, **TARRED, **WHOLE),
    "entries in an entry that is read as a set": of(
        {"type": "lhotse_as_conversation", **CONVERSATION, "input_cfg": [TARRED_ENTRY]},
        **WHOLE,
    ),
}
# The entry's order of files is drawn anew by each rank, but it is one file: the doctor does not
# count files.
UNSAID = {"one text with trng, in a set with 42"}

MULTI = {"multi_config": True, "one": {**TARRED, **COMMON}, **TRNG}
FORCED_PLAIN = {**PLAIN, **COMMON, "force_iterable_dataset": True}
BY_DURATION = {
    **TARRED,
    **TRNG,
    "force_finite": True,
    "batch_size": None,
    "batch_duration": 0.5,
}
ADVISED: dict[str, dict[str, Any]] = {
    "a multi_config with one forced": {**MULTI, "two": FORCED_PLAIN},
    "a multi_config with one forced, as a list": {
        **MULTI,
        "two": {**FORCED_PLAIN, "manifest_filepath": [["FOLDER/plain.json"]]},
    },
    "randomized, after random numbers of a rank's own": {
        **PLAIN,
        "shard_seed": "randomized",
        "random_numbers": 1000,
    },
    "a whole number, after random numbers of a rank's own": {
        **PLAIN,
        **WHOLE,
        "random_numbers": 1000,
    },
    "two plain ones, each once": of(PLAIN_ENTRY, CUTS_ENTRY, **ONCE, **WHOLE),
    "tar files that end": {**TARRED, **TRNG, "force_finite": True},
    "tar files that end, 2 workers": {
        **TARRED,
        **TRNG,
        "force_finite": True,
        "num_workers": 2,
    },
    **{f"by duration, {attempt}": BY_DURATION for attempt in range(8)},
}


def at_random(chance: random.Random) -> dict[str, Any]:
    """One or two inputs, of one kind mostly, in groups or not, with switches and seeds anywhere."""

    def switches() -> dict[str, Any]:
        given: dict[str, Any] = {
            "shard_seed": chance.choice([7, 42, "trng", "randomized"])
        }
        given |= {
            key: chance.random() < 0.5
            for key in ("shuffle", "force_finite", "metadata_only")
        }
        return {key: value for key, value in given.items() if chance.random() < 0.2}

    kinds = [TEXT_ENTRY, TARRED_ENTRY, SHAR_ENTRY], [PLAIN_ENTRY, CUTS_ENTRY]
    pool = [*kinds[0], *kinds[1]] if chance.random() < 0.1 else chance.choice(kinds)
    entries = [
        {**given, **switches()} for given in chance.sample(pool, chance.choice([1, 2]))
    ]
    for _ in range(chance.choice([0, 1, 2])):
        at = chance.randrange(len(entries))
        entries[at] = {"type": "group", "input_cfg": [entries[at]], **switches()}
    forced = {
        f"force_{kind}_dataset": True
        for kind in ("map", "iterable")
        if chance.random() < 0.2
    }
    finite = {"force_finite": True} if chance.random() < 0.4 else {}
    top = {
        "shard_seed": chance.choice([42, "trng", "randomized"]),
        "shuffle": chance.random() < 0.7,
    }
    return of(*entries, **top, **forced, **finite)


RANDOM = {f"at random, {seed}": at_random(random.Random(seed)) for seed in range(20)}
ALL: dict[Any, dict[str, Any]] = {**BY_TYPE, **OTHERS, **ADVISED, **RANDOM}

STOPS = {
    "both kinds": of(TARRED_ENTRY, PLAIN_ENTRY, **TRNG),
    "both kinds in a group": of(
        {"type": "group", "input_cfg": [TEXT_ENTRY, PLAIN_ENTRY]}, **TRNG
    ),
    "both switches": {
        **PLAIN,
        **TRNG,
        "force_map_dataset": True,
        "force_iterable_dataset": True,
    },
    "a type that is none": of({"type": "my_own", **PLAIN}, **TRNG),
}


# --- tiny data, of every type


def write_all(folder: Path) -> None:
    """24 entries for each type, which have the same numbers everywhere."""
    import lhotse

    (folder / "pairs").mkdir()
    for number in range(ENTRIES):
        audio = folder / f"audio{number}.wav"
        noise = numpy.random.default_rng(number).normal(
            0, 0.01, int(16000 * duration_s(number))
        )
        soundfile.write(audio, noise.astype("float32"), 16000)
        (folder / f"text_{number}.txt").write_text(f"text{number}\n")
        jsonl(folder / f"text_{number}.jsonl", {"text": f"text{number}"})
        jsonl(folder / f"sft_{number}.jsonl", sft(number))
        jsonl(
            folder / f"manifest_{number}.json",
            {**manifest_row(number, audio.name), "shard_id": number},
        )
        jsonl(folder / f"chat_{number}.jsonl", chat(number))
        jsonl(folder / f"share_{number}.jsonl", share(number))
        jsonl(folder / f"{number}.json", share(number))
        with tarfile.open(folder / f"audio_{number}.tar", "w") as tar:
            tar.add(audio, audio.name)
        with tarfile.open(folder / f"pairs/pairs_{number}.tar", "w") as tar:
            tar.add(folder / f"{number}.json", f"{number}.json")
            tar.add(audio, f"{number}.wav")
        write_parquet(folder / f"table_{number}.parquet", number, audio)
    (folder / "text.txt").write_text(
        "".join(f"text{number}\n" for number in range(ENTRIES))
    )
    jsonl(
        folder / "plain.json",
        *(
            manifest_row(number, str(folder / f"audio{number}.wav"))
            for number in range(ENTRIES)
        ),
    )
    cuts = lhotse.CutSet.from_cuts(cut(folder, number) for number in range(ENTRIES))
    cuts.to_file(folder / "cuts.jsonl")
    (folder / "shar").mkdir()
    fields = dict.fromkeys(("recording", "target_audio", "context_audio"), "wav")
    cuts.to_shar(folder / "shar", fields=fields, shard_size=1)


def duration_s(number: int) -> float:
    return 0.1 + 0.05 * (number % 3)


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def manifest_row(number: int, file: str) -> dict[str, Any]:
    return {
        "audio_filepath": file,
        "duration": duration_s(number),
        "text": f"text{number}",
    }


def sft(number: int) -> dict[str, Any]:
    turns = [
        {"from": "User", "value": f"text{number}"},
        {"from": "Assistant", "value": "yes"},
    ]
    return {
        "system": "",
        "mask": "User",
        "dataset": "d",
        "id": f"text{number}",
        "conversations": turns,
    }


def chat(number: int) -> dict[str, Any]:
    audio = {
        "from": "User",
        "type": "audio",
        "value": f"audio{number}.wav",
        "duration": duration_s(number),
    }
    return {
        "id": f"chat{number}",
        "conversations": [audio, {"from": "Assistant", "type": "text", "value": "yes"}],
    }


def share(number: int) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": "<sound> what?"},
        {"from": "gpt", "value": "yes"},
    ]
    return {
        "id": f"share{number}",
        "sound": f"audio{number}.wav",
        "conversations": turns,
    }


def write_parquet(path: Path, number: int, audio: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    row = {
        "id": f"row{number}",
        "audio": audio.read_bytes(),
        "text": "x",
        "duration": duration_s(number),
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)


def cut(folder: Path, number: int) -> Any:
    """With what the parsers for speech to speech look for."""
    from lhotse import Recording, SupervisionSegment

    def recording(name: str) -> Recording:
        return Recording.from_file(
            folder / f"audio{number}.wav", recording_id=f"{name}{number}"
        )

    speech = recording("cut").to_cut().with_id(f"cut{number}")
    halves = [(0.0, "user"), (0.05, "agent")]
    speech.supervisions = [
        SupervisionSegment(
            f"{number}-{who}", speech.recording_id, start, 0.05, text="yes", speaker=who
        )
        for start, who in halves
    ]
    segment = {"start": 0.0, "end": 0.05, "text": "yes"}
    words = {
        "question": "what?",
        "answer": "yes",
        "agent_segments": [segment],
        "user_segments": [segment],
    }
    speech.custom = {
        **words,
        "target_audio": recording("target"),
        "context_audio": recording("context"),
    }
    return speech


# --- real loaders, on two ranks


CHECKOUT = Path(__file__).parents[1]
Batches = list[list[str]]


class Ids:
    """A data set that makes of a batch the names of its entries."""

    def __getitem__(self, cuts: Any) -> list[str]:
        return [name(example) for example in cuts]


def name(example: Any) -> str:
    """An entry's, without what Lhotse adds where it repeats or copies one."""
    text = getattr(example, "id", None) or getattr(example, "text", None)
    if text is None:
        text = example.source.text if hasattr(example, "source") else example.data["id"]
    return re.sub(
        r"(_repeat\d+|_dup\d+|_[0-9a-f]{8}-[0-9a-f-]{27})+$", "", text.strip()
    )


def batches_of_all(
    rank: int, size: int, folder: str, configs: dict[Any, dict[str, Any]]
) -> dict[Any, Any]:
    """Of each config: whether it is a stream, and the first batches that this rank gets; or the
    error of NeMo.
    """
    import multiprocessing

    # Of the data loaders' workers, as in a job.
    multiprocessing.set_start_method("fork", force=True)
    return {
        name: batches_of(rank, size, folder, config) for name, config in configs.items()
    }


def batches_of(
    rank: int, size: int, folder: str, config: dict[str, Any]
) -> tuple[bool, Batches] | str:
    from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
    from omegaconf import OmegaConf
    from torch.utils.data import IterableDataset

    config = json.loads(json.dumps({**COMMON, **config}).replace("FOLDER", folder))
    random_numbers = config.pop("random_numbers", 0)
    try:
        loader = get_lhotse_dataloader_from_config(
            OmegaConf.create(config), rank, size, Ids()
        )
        for _ in range(rank * random_numbers):
            random.random()
        return isinstance(loader.dataset, IterableDataset), list(
            itertools.islice(loader, MOST)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- what was read, and what the doctor says of it


@dataclass(frozen=True)
class Read:
    """What two ranks read."""

    stream: bool
    ranks: tuple[Batches, Batches]

    @property
    def endless(self) -> bool:
        return len(self.ranks[0]) == MOST

    @property
    def same(self) -> int:
        """How many of the first batches were the same on both ranks."""
        return sum(
            one == other
            for one, other in zip(
                *(batches[:FIRST] for batches in self.ranks), strict=True
            )
        )

    @property
    def shared(self) -> bool:
        """Whether no entry was read twice, over both ranks; where data are there twice, no more
        often than that.
        """
        counts = collections.Counter(itertools.chain(*self.ranks[0], *self.ranks[1]))
        return len(set(counts.values())) == 1

    def __str__(self) -> str:
        if self.stream:
            return "the same batches" if self.same == FIRST else "other batches"
        return "each entry once" if self.shared else "some twice, others never"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Read | str]:
    folder = tmp_path_factory.mktemp("data")
    write_all(folder)
    configs = {name: config for name, config in ALL.items() if installed(config)}
    one, other = (
        result.value
        for result in run_ranks(
            batches_of_all, 2, str(folder), configs, group=False, limit=800
        )
    )
    return {
        name: (
            one[name]
            if isinstance(one[name], str)
            else Read(one[name][0], (one[name][1], other[name][1]))
        )
        for name in configs
    }


def types_in(node: Any) -> set[str]:
    """The types in a config."""
    if isinstance(node, dict):
        return (
            {node["type"]} & {*KNOWN_TYPES}
            if "type" in node
            else types_in(list(node.values()))
        )
    return set().union(*map(types_in, node)) if isinstance(node, list) else set()


def installed(config: dict[str, Any]) -> bool:
    return all(
        _version(KNOWN_TYPES[name][1]) <= _version(nemo_version())
        for name in types_in(config)
    )


def nemo_version() -> str:
    from nemo.package_info import __version__

    return str(__version__)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def job(config: dict[str, Any], role: str = "train_ds") -> Job:
    given = {
        "model": {role: {"use_lhotse": True, **COMMON, **config}},
        "trainer": {"devices": 2},
    }
    return Job(
        reading.with_overrides(
            yaml_text.parse(Path("config.yaml"), json.dumps(given)), ()
        )
    )


def said(
    rule: str, config: dict[str, Any], role: str = "train_ds"
) -> list[RuleFinding]:
    found = examination.checked(job(config, role), examination.chosen([rule]))
    # Beside it, what was not judged.
    return [finding for each, finding in found if each.identifier == rule]


# --- the tests


@pytest.mark.matrix
def test_the_table_of_types_is_nemos_own_registry() -> None:
    from nemo.collections.common.data.lhotse import cutset

    registry = (
        getattr(cutset, "KNOWN_DATA_CONFIG_TYPES", None)
        or cutset.KNOWN_DATASET_CONFIG_TYPES
    )
    known = {
        name
        for name, (_, since) in KNOWN_TYPES.items()
        if _version(since) <= _version(nemo_version())
    }
    assert set(registry) == known
    assert {name for name, _, _ in TYPES} == set(KNOWN_TYPES) - {
        "group",
        "multi_speaker_simulator",
    }


@pytest.mark.parametrize("name", [*BY_TYPE, *OTHERS], ids=str)
def test_the_doctor_says_of_a_config_what_two_ranks_read(
    name: Any, measured: dict[Any, Read | str]
) -> None:
    if name not in measured:
        pytest.skip("a type of a later NeMo")
    config, read = ALL[name], measured[name]
    assert isinstance(read, Read), read
    (dataset,) = job(config).datasets
    assert (dataset.tarred, dataset.endless, dataset.inputs.unknown) == (
        read.stream,
        read.endless,
        "",
    )
    findings = said("NP122", config)
    if name in UNSAID:
        assert findings == []
    elif read.stream:
        assert [
            "all train on the same batches" in finding.what for finding in findings
        ] == [True] * (read.same == FIRST)
    else:
        harm = not read.shared and not read.endless
        assert [
            "read twice and others never" in finding.what for finding in findings
        ] == [True] * harm


@pytest.mark.parametrize("name", RANDOM)
def test_the_doctor_says_of_a_config_made_at_random_what_two_ranks_read(
    name: str, measured: dict[Any, Read | str]
) -> None:
    config, read = RANDOM[name], measured[name]
    (dataset,) = job(config).datasets
    findings = [
        finding for finding in said("NP122", config) if finding.severity > Severity.NOTE
    ]
    if isinstance(read, str):
        assert (
            dataset.inputs.refused or "exclude each other" in dataset.inputs.unknown
        ), read
        assert findings == []
        return
    assert (dataset.tarred, dataset.endless, dataset.inputs.unknown) == (
        read.stream,
        read.endless,
        "",
    )
    harm = read.same == FIRST if read.stream else not read.shared and not read.endless
    # Of files, which are not counted.
    own_draws = any("trng" in str(entry) for entry in config["input_cfg"])
    assert bool(findings) == harm or (harm and own_draws)


@pytest.mark.parametrize("name", STOPS)
def test_what_nemo_refuses_is_not_judged(name: str, tmp_path: Path) -> None:
    config = STOPS[name]
    assert said("NP104", config) == []
    assert [finding.severity for finding in said("NP122", config)] in (
        [],
        [Severity.NOTE],
    )
    assert len(said("NP124", config)) == name.startswith("both kinds")


def test_nemo_refuses_it(tmp_path: Path) -> None:
    write_all(tmp_path)
    (rank,) = run_ranks(batches_of_all, 1, str(tmp_path), STOPS, group=False)
    assert all(isinstance(read, str) for read in rank.value.values()), rank.value


# Each `instead` of the doctor that concerns data, applied.


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_as_advised_is_read_in_other_orders(
    name: str, measured: dict[Any, Read | str]
) -> None:
    for bad in (
        BY_TYPE[name, "a whole number"],
        BY_TYPE[name, "randomized, 0 workers"],
    ):
        (finding,) = said("NP122", bad)
        own = "model.train_ds.shard_seed"
        assert finding.instead.endswith(
            f"shuffle: true, with {own}: trng, or randomized and num_workers: 1 or more"
        )
    for good in ("trng", "randomized, 1 worker"):
        assert str(measured[name, good]) == "other batches"
        assert said("NP122", BY_TYPE[name, good]) == []


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_on_a_stream_as_advised_reads_each_entry_once(
    name: str, measured: dict[Any, Read | str]
) -> None:
    (endless,) = said("NP108", of(entry(name)), "validation_ds")
    assert endless.instead.startswith(
        "model.validation_ds.force_finite: true, also of its entries, "
    )
    (whole,) = said("NP108", of(entry(name), force_finite=True), "validation_ds")
    once = (
        "model.validation_ds.force_map_dataset: true, and a whole number as"
        " model.validation_ds.shard_seed"
    )
    assert once in endless.instead and once in whole.instead
    assert said("NP108", of(entry(name), **ONCE, **WHOLE), "validation_ds") == []
    assert str(measured[f"{name}, forced, 42"]) == "each entry once"


def test_what_is_shared_out_as_advised_is_read_once(
    measured: dict[Any, Read | str],
) -> None:
    (shares,) = said("NP122", {**PLAIN, **TRNG})
    assert shares.instead == "model.train_ds.shard_seed: a whole number"
    (inner,) = said("NP122", of({**SHAR_ENTRY, **TRNG}, **ONCE, **WHOLE))
    assert inner.instead == "model.train_ds.input_cfg.0.shard_seed: a whole number"
    (of_mixed,) = said("NP108", of(PLAIN_ENTRY, CUTS_ENTRY), "validation_ds")
    assert (
        "force_finite: true, also of its entries,"
        " model.validation_ds.force_map_dataset: true" in of_mixed.instead
    )
    for role, rule in (("train_ds", "NP105"), ("validation_ds", "NP108")):
        (forced,) = said(rule, {**PLAIN, "force_iterable_dataset": True}, role)
        assert (
            "force_iterable_dataset: false, " in forced.instead
            and "a whole number" in forced.instead
        )
    assert (
        str(measured["nemo", "a whole number"])
        == str(measured["lhotse", "a whole number"])
        == "each entry once"
    )
    for name in ("two plain ones, each once", "both kinds, each once, 42"):
        assert (str(measured[name]), measured[name].endless) == (
            "each entry once",
            False,
        )
    # Not advised: without a worker, randomized is what the process's own random numbers have come
    # to.
    assert (
        str(measured["a whole number, after random numbers of a rank's own"])
        == "each entry once"
    )
    assert (
        str(measured["randomized, after random numbers of a rank's own"])
        == "some twice, others never"
    )


def test_a_stream_that_ends_has_as_many_batches_on_all_ranks_only_if_they_have_one_size(
    measured: dict[Any, Read | str],
) -> None:
    for name, config in ADVISED.items():
        if "tar files that end" in name:
            assert [finding.severity for finding in said("NP105", config)] == [
                Severity.NOTE
            ]
            assert len(measured[name].ranks[0]) == len(measured[name].ranks[1])
    assert [finding.severity for finding in said("NP105", BY_DURATION)] == [
        Severity.ERROR
    ]
    attempts = [
        measured[name].ranks for name in ADVISED if name.startswith("by duration")
    ]
    assert any(len(one) != len(other) for one, other in attempts)


def test_of_a_multi_config_both_sets_are_read_on_and_on_as_advised(
    measured: dict[Any, Read | str],
) -> None:
    plain = {**MULTI, "two": {**PLAIN, **COMMON}, "seed": 0, "shuffle": True}
    (finding,) = said("NP124", plain)
    assert (
        "two.force_iterable_dataset: true, with its manifest_filepath as a list"
        in finding.instead
    )
    last = {
        name: list(itertools.chain(*measured[name].ranks[0][-6:]))
        for name in ADVISED
        if "multi_config" in name
    }
    tarred = {
        name: all(entry.endswith(".wav") for entry in entries)
        for name, entries in last.items()
    }
    assert list(tarred.values()) == [True, False]  # alone, the forced one is read once


def documented(kind: str) -> list[str]:
    """The cells of a kind's row in docs/doctor.md."""
    text = (CHECKOUT / "docs" / "doctor.md").read_text()
    (row,) = re.findall(rf"^\| {kind} \| (.*) \|$", text, re.MULTILINE)
    return row.split(" | ")


def test_the_table_in_the_documentation_is_what_two_ranks_read(
    measured: dict[Any, Read | str],
) -> None:
    for name in TYPE_NAMES:
        kind = "a stream" if name in STREAMS else "shared out"
        for seed, cell in zip(SEEDS, documented(kind), strict=True):
            if (name, seed) in measured:
                assert cell == str(measured[name, seed]), (name, seed)


def test_the_documentation_names_the_types_that_are_streams_without_tar_files() -> None:
    text = (CHECKOUT / "docs" / "doctor.md").read_text()
    (types,) = re.findall(r"these, the types (.*?)\. All others", text, re.DOTALL)
    streams = {name for name, keys, _ in TYPES if not keys} & set(STREAMS)
    assert set(re.findall(r"`(\w+)`", types)) == streams
    with_files = {keys for _, keys, _ in TYPES if keys}
    assert f"with {' or '.join(sorted(with_files, reverse=True))}," in text
