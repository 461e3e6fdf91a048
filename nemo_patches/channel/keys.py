"""Every key that nemo_patches has in the job's store."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

PREFIX = "nemo_patches"  # above all other keys
ATTEMPT = "attempt"  # the number of the process group that meets here at present
SEAT = "{attempt}/seat/{rank}"  # the random id of the process that is this rank
# Below an attempt's number. Of the side channel:
ROOT = "root"  # rank 0 has come
PLACE = "place/{rank}"  # the rank's host, or why it cannot take part; set once rank 0 has come
HOSTS = "hosts"  # the hosts of all ranks: set by rank 0, once all have registered
DOOR = "door/{rank}"  # where an inner rank of the tree listens for its children, and the token that admits them
MIRRORED_DOOR = "mirrored door/{rank}"  # the same, in the tree that is upside down
GONE = "gone"  # a rank that has died, from a rank that cannot tell all others
# Of the roll call, and of stall reports while not all ranks have surveys:
PRESENT = "present/{block}"  # one bit for each rank of a block, in a number that ranks add to: every store can add
NOTED = "noted/{block}"  # the same: who has left a note
RANKS_PER_BLOCK = 62
NOTE = "note/{rank}"  # a rank's own state, as in a survey; empty once it has gone on
