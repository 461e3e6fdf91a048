"""`nemo-patches doctor`: what in a training config can hang, corrupt or slow a run on several ranks, before it starts.

It imports neither torch nor NeMo, and executes nothing of what it reads.
"""
