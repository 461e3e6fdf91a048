"""Makes tones in noise, and NeMo manifests of them, for the other examples: python
examples/make_audio.py FOLDER
"""

from __future__ import annotations

import json
import sys
import wave
from pathlib import Path

import numpy

RATE_HZ = 16000


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    entries = []
    for number in range(24):
        seconds = 1.0 + number / 12
        times = numpy.arange(int(seconds * RATE_HZ)) / RATE_HZ
        tone = (
            numpy.sin(2 * numpy.pi * random.uniform(100, 3000) * times)
            + random.standard_normal(times.size) / 4
        )
        path = folder.absolute() / f"tone-{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)  # bytes
            file.setframerate(RATE_HZ)
            file.writeframes((tone * 4000).astype("<i2").tobytes())
        entries.append(
            json.dumps(
                {"audio_filepath": str(path), "duration": seconds, "text": "a tone"}
            )
            + "\n"
        )
    for name, part in (
        ("train", entries[:16]),
        ("validation", entries[16:]),
        ("noise", entries[:1]),
    ):
        (folder / f"{name}.json").write_text("".join(part), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
