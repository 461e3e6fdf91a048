"""Connections among the ranks of a job:
rounds over a tree of sockets, and the part of the job's store that is ours.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0
