"""The installed NeMo, compared with what nemo_patches supports; torch and Lightning, compared with what NeMo requires.

Outside the supported range nemo_patches patches nothing, so NeMo's wait for every rank has no limit. NeMo's
requirements are in its own metadata; it was never tested with other versions.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/pyproject.toml
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from nemo_patches.patching import admission
from nemo_patches.sync.settings import SettingsError
from nemo_patches.tools.doctor.finding import WARNING, Findings, note, warning
from nemo_patches.tools.doctor.machine import Machine, fact

WORST = WARNING
TOPIC = "versions"


def check(machine: Machine) -> Findings:
    """By the packages' metadata; NeMo's own version by its code, which may be a checkout."""
    if machine.status is None:
        missing = " and ".join(name for name in ("nemo_toolkit", "torch") if name not in machine.versions)
        yield note(f"{missing or 'NeMo'} is not installed here: what it would be like was not looked at")
        return
    nemo = machine.status.versions["nemo"]
    try:
        admission.require_supported(nemo, machine.environment)
    except (admission.UnsupportedNeMo, SettingsError) as error:
        built_in = any(target.built_in for target in machine.status.targets)
        if not built_in:  # one of the diffs is in it, and that asks for no version
            yield warning(str(error), fact("NeMo", nemo), f"NeMo {admission.SUPPORTED}")
    for name, wanted in machine.needs.items():
        version = machine.versions.get(name)
        if version is not None and not SpecifierSet(wanted).contains(version, prereleases=True):
            what = f"NeMo {nemo} asks for {name} {wanted}"
            yield warning(what, fact(name, version), f"{name} {wanted}")
