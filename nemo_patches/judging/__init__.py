"""What turns the facts of ranks into a verdict and its text; the standard library alone.

Ranks and `diagnose` use it.

A rank imports none of it until there is something to judge (watch/late_modules.py).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0
