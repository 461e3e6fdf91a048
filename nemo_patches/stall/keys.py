"""The keys of the roll call and of stall reports in the job's store, below the attempt's part of it (sync/store.py)."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

ANNOUNCED = "announced"  # how many ranks have announced themselves
PRESENT = "present/{block}"  # one bit for each rank of a block, in a number that ranks add to: every store can add
RANKS_PER_BLOCK = 62
PEERS = "peers"  # where each rank's process is, and where it listens: rank 0's, once all have announced themselves
HEARTBEAT = "beat/{rank}"
QUERY = "stall/{encoder}/{round}/{repeat}.{attempt}"  # who finds out who is missing, and what that rank has found
WAITED_FOR = "waited_for/{rank}"  # what the ranks that waited for this one have left for it
FIGURES = "figures/{rank}"  # for the Lightning callback
