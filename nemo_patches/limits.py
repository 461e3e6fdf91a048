"""The limits of time of a question to all ranks, from the shortest: what each covers, in seconds.

A rank asks where all are, and reports it. A later step must leave those before it their time, in a
job of any size; tests/test_limits.py holds that.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# A rank that is asked says that it is there: else it is passed over, and those below it are asked
# directly.
HERE_S = 0.8
# Its watch, another thread, gives what it knows: else it is there, and without a watch.
OWN_STATE_S = 1.0
# The rank that judges says who is where: else its place is taken by the next one.
VERDICT_S = 1.0
# All answers come together: HERE_S and OWN_STATE_S on the way down, and again past silent ranks.
ANSWERS_S = 2.4
# A report that is due waits so long for a question that has begun: ANSWERS_S, or it says less.
PATIENCE_S = 2.6
# A question that nobody has answered is given up: ANSWERS_S, and VERDICT_S of two that judge.
LOOK_S = 5.0

# Added for each rank of the job: many may share a machine.
HERE_PER_RANK_S = 0.0006
ANSWERS_PER_RANK_S = 2 * HERE_PER_RANK_S
REPORT_PER_RANK_S = 0.002  # to PATIENCE_S and LOOK_S
