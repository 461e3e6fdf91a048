"""The demo's data: the user's manifest or synthetic audio, dealt out to the ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.tools.demo.jobs import (
    BATCH_SIZE,
    TRAINING_STEPS,
    UNEVEN_RANK,
    VALIDATION_BATCHES,
    DemoError,
)

SHORTEST_AUDIO_S = 0.5
LONGEST_AUDIO_S = 10.0  # longer files are cut, to keep the demo short


@dataclass(frozen=True)
class ManifestEntry:
    """A piece of audio of a manifest; times in seconds, as the manifest has them."""

    audio: Path
    offset: float
    duration: float


def from_manifest(manifest: Path) -> list[ManifestEntry]:
    """The entries of the user's manifest that are long enough. Raises DemoError if it cannot be
    used.
    """
    entries = []
    where = f"--manifest={manifest}"
    folder = (
        manifest.absolute().parent
    )  # else Pythons differ in the path that an error names
    try:
        for number, line in enumerate(
            manifest.read_text(encoding="utf-8").splitlines(), 1
        ):
            where = f"--manifest={manifest} line {number}"
            if line.strip():
                item = json.loads(line)
                audio = (folder / item["audio_filepath"]).resolve(strict=True)
                entries.append(
                    ManifestEntry(
                        audio, float(item.get("offset") or 0), float(item["duration"])
                    )
                )
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        needed = (
            'a NeMo manifest, a line for each file: {"audio_filepath": ..., "duration":'
            " seconds}"
        )
        raise DemoError(
            f"{where}: {type(error).__name__}: {error}; allowed: {needed}"
        ) from None
    usable = [entry for entry in entries if entry.duration >= SHORTEST_AUDIO_S]
    if not usable:
        raise DemoError(
            f"{where}: no entry of {SHORTEST_AUDIO_S:g} s or longer; at least one is"
            " needed"
        )
    return usable


def make_audio(folder: Path) -> list[ManifestEntry]:
    """Write tones in noise. Their lengths differ, so that the ranks have something to agree on."""
    import numpy
    import soundfile

    random = numpy.random.default_rng(0)
    entries = []
    for number, duration in enumerate(numpy.linspace(1.0, 3.0, 9)):
        times = numpy.arange(int(duration * 16000)) / 16000
        tones = sum(
            numpy.sin(2 * numpy.pi * pitch * times)
            for pitch in random.uniform(100, 3000, 3)
        )
        path = folder / f"tones-{number}.wav"
        soundfile.write(
            path, 0.1 * tones + 0.05 * random.standard_normal(times.size), 16000
        )
        entries.append(ManifestEntry(path, 0.0, float(duration)))
    return entries


def write_shards(
    entries: Sequence[ManifestEntry], devices: int, folder: Path, uneven: bool = True
) -> None:
    """Write each rank's training and validation manifest, dealt out in turn, and NEST's noise
    manifest.

    uneven: UNEVEN_RANK gets one more validation batch; the rest is the same without it.
    """
    import numpy
    import soundfile

    supply = itertools.cycle(entries)

    def batches(count: int) -> list[ManifestEntry]:
        return list(itertools.islice(supply, count * BATCH_SIZE))

    training = [batches(TRAINING_STEPS) for _ in range(devices)]
    validation = [batches(VALIDATION_BATCHES) for _ in range(devices)]
    if uneven:
        validation[UNEVEN_RANK] += batches(1)
    for rank in range(devices):
        _write_manifest(folder / f"train-{rank}.json", training[rank])
        _write_manifest(folder / f"validation-{rank}.json", validation[rank])
    noise = ManifestEntry(folder / "noise.wav", 0.0, 2.0)
    soundfile.write(
        noise.audio,
        0.05 * numpy.random.default_rng(1).standard_normal(2 * 16000),
        16000,
    )
    _write_manifest(folder / "noise.json", [noise])


def _write_manifest(path: Path, entries: Iterable[ManifestEntry]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            duration = min(entry.duration, LONGEST_AUDIO_S)
            line = {
                "audio_filepath": str(entry.audio),
                "offset": entry.offset,
                "duration": duration,
                "text": "",
            }
            file.write(json.dumps(line) + "\n")
