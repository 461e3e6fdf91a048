"""The ranks missing from a stalled call, and what they do: a subscriber of the sync's events."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0
