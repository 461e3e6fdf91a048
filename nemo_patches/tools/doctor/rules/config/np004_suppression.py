"""A suppression that has no reason, names no rule, or no longer suppresses anything.

`# nemo-patches: ignore[NP107] shards are equal` at the end of a line, or alone above it, applies to
the findings on that line. A suppression without a reason, or without a finding, would hide the next
finding there.
Link: docs/doctor.md
"""

from nemo_patches.tools.doctor.finding import WARNING

WORST = WARNING
# No check: suppressions.py, which knows what the other rules found, reports it.
