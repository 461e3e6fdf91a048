"""`nemo-patches diagnose`: from a trace, or a training log, to the rank, the place and the reason."""
