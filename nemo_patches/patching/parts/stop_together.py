"""A StopTogether for each of Lightning's trainers."""

from __future__ import annotations

from nemo_patches.options.stop_together import StopTogether
from nemo_patches.patching.parts import Part
from nemo_patches.sync.settings import EVALUATION, TRAINING, Settings


def _callback(settings: Settings) -> StopTogether:
    stages = settings.stop_together
    return StopTogether(training=TRAINING in stages, evaluation=EVALUATION in stages)


PART = Part(setting="stop_together", callback=_callback)
