"""The length sync of one encoder call. Read encoder_methods, then length_sync and protocol."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

__version__ = "0.2.0"  # of the nemo_patches that this folder is from, wherever it is
