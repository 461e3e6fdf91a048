"""The demo's data: the user's manifest or synthetic audio, dealt out to the ranks."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.tools.demo.errors import DemoError
from nemo_patches.tools.demo.jobs import BATCH_SIZE, TRAINING_STEPS, UNEVEN_RANK, VALIDATION_BATCHES

SHORTEST_AUDIO_S, LONGEST_AUDIO_S = 0.5, 10.0  # longer files are cut, to keep the demo short


@dataclass(frozen=True)
class Entry:
    """A piece of audio of a manifest; times in seconds, as the manifest has them."""

    audio: Path
    offset: float
    duration: float


def entries_needed(devices: int) -> int:
    """How many entries write_shards deals out; it repeats them if there are fewer."""
    return BATCH_SIZE * (devices * (TRAINING_STEPS + VALIDATION_BATCHES) + 1)


def from_manifest(manifest: Path, needed: int) -> tuple[list[Entry], list[str]]:
    """The usable entries of the user's manifest, at most `needed`, and a sentence on each change to them.

    Raises DemoError where the manifest cannot be used.
    """
    entries = _read(manifest)
    usable = [entry for entry in entries if entry.duration >= SHORTEST_AUDIO_S]
    if not usable:
        raise DemoError(f"--manifest={manifest}: no entry of {SHORTEST_AUDIO_S:g} s or longer; at least one is needed")
    used = usable[:needed]
    cut = sum(entry.duration > LONGEST_AUDIO_S for entry in used)
    changes = []
    if skipped := len(entries) - len(usable):
        changes.append(f"{skipped} of {len(entries)} entries skipped, shorter than {SHORTEST_AUDIO_S:g} s")
    if unused := len(usable) - len(used):
        changes.append(f"{unused} of {len(entries)} entries not used, the demo needs only {needed}")
    if len(used) < needed:
        changes.append(f"the demo needs {needed} entries, so it repeats the {len(used)} it has")
    if cut:
        changes.append(f"{cut} of {len(used)} entries used only in part, the first {LONGEST_AUDIO_S:g} s")
    return used, changes


def _read(manifest: Path) -> list[Entry]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DemoError(
            f"--manifest={manifest}: {reason}; allowed: a NeMo manifest, one JSON object per line"
        ) from None
    return [
        _entry(f"--manifest={manifest} line {number}", line, manifest.parent)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _entry(where: str, line: str, folder: Path) -> Entry:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise DemoError(f"{where} is not JSON: {error}") from None
    if not isinstance(item, dict) or not isinstance(item.get("audio_filepath"), str):
        raise DemoError(f'{where}: no audio_filepath; needed: {{"audio_filepath": ..., "duration": seconds}}')
    audio = folder / item["audio_filepath"]
    if not audio.is_file():
        raise DemoError(f"{where}: audio_filepath={item['audio_filepath']!r}: there is no file {audio}")
    duration = _seconds(where, "duration", item.get("duration"))
    return Entry(audio.resolve(), _seconds(where, "offset", item.get("offset") or 0), duration)


def _seconds(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DemoError(f"{where}: {name}={value!r} is not allowed; allowed: a number of seconds")
    return float(value)


def make_audio(folder: Path) -> list[Entry]:
    """Write tones in noise. Their lengths differ, so that the ranks have something to agree on."""
    import numpy
    import soundfile

    random = numpy.random.default_rng(0)
    entries = []
    for number, duration in enumerate(numpy.linspace(1.0, 3.0, 9)):
        times = numpy.arange(int(duration * 16000)) / 16000
        tones = sum(numpy.sin(2 * numpy.pi * pitch * times) for pitch in random.uniform(100, 3000, 3))
        path = folder / f"tones-{number}.wav"
        soundfile.write(path, 0.1 * tones + 0.05 * random.standard_normal(times.size), 16000)
        entries.append(Entry(path, 0.0, float(duration)))
    return entries


def write_shards(entries: Sequence[Entry], devices: int, folder: Path, uneven: bool = True) -> None:
    """Write each rank's training and validation manifest, dealt out in turn, and NEST's noise manifest.

    uneven: UNEVEN_RANK gets one more validation batch; the rest is the same without it.
    """
    import numpy
    import soundfile

    supply = itertools.cycle(entries)

    def batches(count: int) -> list[Entry]:
        return list(itertools.islice(supply, count * BATCH_SIZE))

    training = [batches(TRAINING_STEPS) for _ in range(devices)]
    validation = [batches(VALIDATION_BATCHES) for _ in range(devices)]
    if uneven:
        validation[UNEVEN_RANK] += batches(1)
    for rank in range(devices):
        _write_manifest(folder / f"train-{rank}.json", training[rank])
        _write_manifest(folder / f"validation-{rank}.json", validation[rank])
    noise = Entry(folder / "noise.wav", 0.0, 2.0)
    soundfile.write(noise.audio, 0.05 * numpy.random.default_rng(1).standard_normal(2 * 16000), 16000)
    _write_manifest(folder / "noise.json", [noise])


def _write_manifest(path: Path, entries: Iterable[Entry]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            duration = min(entry.duration, LONGEST_AUDIO_S)
            line = {"audio_filepath": str(entry.audio), "offset": entry.offset, "duration": duration, "text": ""}
            file.write(json.dumps(line) + "\n")
