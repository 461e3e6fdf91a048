"""Which ranks are behind, by the encoder calls in traces, where others are known to have waited."""

from __future__ import annotations

from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.accounts import Hearing
from nemo_patches.tools.diagnose.findings import Ruling
from nemo_patches.tools.diagnose.verdicts import Wait, all_absent


def by_calls(hearing: Hearing) -> Ruling:
    """Ranks at unlike calls show no wait by themselves: a healthy job that is killed looks so. Nor
    do closed connections: by those by_ends.py tells who had gone.
    """
    known = [one for one in hearing.accounts.values() if one.call is not None]
    waited = [
        one for one in known if one.waits is not None and one.fate_kind != fates.CUT
    ]
    top = max((one.position for one in waited), default=(0, 0))
    behind = [
        one
        for one in known
        if one not in waited and one.position < top and not one.moved
    ]
    others = [one for one in waited if one.position == top]
    if not behind or 2 * len(behind) > len(known) or len(others) + len(behind) < 2:
        return Ruling()
    if any(one.fate_kind == fates.GONE for one in behind):
        behind = [one for one in behind if one.fate_kind == fates.GONE]
    call = others[0].call
    assert call is not None
    how = "" if call.phase else "went through"
    wait = Wait(tuple(one.rank for one in others), call.title, how=how)
    return Ruling(tuple(all_absent(behind, wait)))
