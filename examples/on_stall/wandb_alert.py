"""on_stall: an alert of Weights & Biases, which mails or posts it as its user has set up there.

export NEMO_PATCHES_ON_STALL='python /path/to/nemo-patches/examples/on_stall/wandb_alert.py'

The alert is a run of its own, in the project of WANDB_PROJECT: the training's run is in another
process, and may hang with it.
"""

import json
import sys

import wandb

report = json.load(sys.stdin)
missing = ", ".join(str(one["rank"]) for one in report["missing"]) or "not known"
with wandb.init(job_type="stall", config={"rank": report["rank"]}) as run:
    run.alert(
        title=f"Stalled; missing ranks: {missing}",
        text=report["text"],
        level=wandb.AlertLevel.ERROR,
    )
