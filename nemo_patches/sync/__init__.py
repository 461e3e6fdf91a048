"""Runs inside training: the bounded length sync, stall reports, and private growth of length-sized buffers."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

__version__ = "0.1.0"  # of the nemo_patches that this folder is from, wherever it is
