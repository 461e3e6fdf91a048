"""The fix: the length sync, bounded in time, and private growth of length-sized buffers. Read encoder_methods first."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

__version__ = "0.1.0"  # of the nemo_patches that this folder is from, wherever it is
