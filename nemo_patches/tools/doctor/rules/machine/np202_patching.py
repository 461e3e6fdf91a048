"""Whether NeMo would be patched in this environment, and which sitecustomize runs.

A rank that is not patched still waits for every other rank without a timeout, and the others cannot help it. If
another sitecustomize comes first on PYTHONPATH, ours never runs.
Link: docs/design.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, note, warning
from nemo_patches.tools.doctor.machine import Machine, fact

WORST = WARNING
TOPIC = "patching"


def check(machine: Machine) -> Findings:
    """By what `nemo-patches status` finds."""
    status = machine.status
    if status is None:
        return
    read = (
        fact("auto-apply", status.auto_apply),
        fact("sitecustomize that it runs after its own", status.chained or "none"),
    )
    for sentence in status.misspelt:
        yield warning(sentence, read, "see `nemo-patches status`")
    for reason in status.reasons:
        if "is not supported" not in reason:  # NP201 says that
            yield warning(f"not all would be patched: {reason}", read, "see `nemo-patches status`")
    if status.reasons:
        return
    after = f"; after its own it runs the sitecustomize {status.chained}" if status.chained else ""
    if status.auto_apply == "on":
        yield note(f"every Python process of this environment patches NeMo when it imports it{after}", read)
    else:
        yield note(
            "nothing patches NeMo here by itself: the training script must call nemo_patches.apply(), or be started "
            "with `nemo-patches run --`",
            read,
        )
