"""`nemo-patches diagnose`:
from a folder of traces, or a training log, to the rank, the place and the reason.
"""
