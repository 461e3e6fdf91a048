"""`nemo-patches doctor`:
what in a training config can hang a run on several ranks, or stop it at its start.

It imports neither torch nor NeMo, and executes nothing of what it reads.
"""
