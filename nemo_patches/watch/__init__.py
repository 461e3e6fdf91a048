"""The ranks missing from a stalled call, and what they do: an observer of the sync."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0
