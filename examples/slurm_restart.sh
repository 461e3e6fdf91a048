#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --open-mode=append
# a stall of 10 minutes ends the step: ranks that wait end with exit code 83
export NEMO_PATCHES_STALL_EXIT=600
log="step-$SLURM_JOB_ID.log"
srun --kill-on-bad-exit nemo-patches run -- python train.py 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
# which rank ended how, srun says; its code is the highest, 137 or 143 where it ended the others
ends=$(grep -E '^srun: error: .*: tasks? [0-9,-]+: ' "$log")
# a stall, or a rank that was killed first; not where a rank raised an error
if grep -q 'exit code 83$' <<<"$ends" || head -n 1 <<<"$ends" | grep -q 'Killed$'; then
    # held until somebody has looked, and runs `scontrol release J`; requeue: starts again at once
    scontrol requeuehold "$SLURM_JOB_ID"
fi
exit "$code"
