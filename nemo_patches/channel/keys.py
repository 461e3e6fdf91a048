"""Every key that nemo_patches has in the job's store."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

PREFIX = "nemo_patches"  # above all other keys
ATTEMPT = "attempt"  # the number of the process group that meets here at present
SEAT = "{attempt}/seat/{rank}"  # the random id of the process that is this rank
# Below an attempt's number. Of the side channel:
ROOT = "root"  # rank 0 has come
PLACE = "place/{rank}"  # which host a rank is on, or why it cannot take part; once rank 0 has come
HOSTS = "hosts"  # of all ranks: rank 0's, once all have said where they are
DOOR = "door/{rank}"  # where an inner rank of the tree listens for its children, and the token that admits them
MIRRORED_DOOR = "mirrored door/{rank}"  # the same, in the tree that is upside down
GONE = "gone"  # a rank that has gone, where who knows it has no connection to some of the others
# Of the roll call and of stall reports:
ANNOUNCED = "announced"  # how many ranks have announced themselves
PRESENT = "present/{block}"  # one bit for each rank of a block, in a number that ranks add to: every store can add
RANKS_PER_BLOCK = 62
PEERS = "peers"  # where each rank's process is, and where it listens: rank 0's, once all have announced themselves
HEARTBEAT = "beat/{rank}"
QUERY = "stall/{encoder}/{round}/{repeat}.{attempt}"  # who finds out who is missing, and what that rank has found
CENSUS_NUMBER = "census"  # of the last one that has been taken of where all ranks are
CENSUS = "census/{number}.{attempt}"  # who takes it, and its groups
WAITED_FOR = "waited_for/{rank}"  # what the ranks that waited for this one have left for it
FIGURES = "figures/{rank}"  # for the Lightning callback
