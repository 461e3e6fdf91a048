"""Records of encoder calls on each rank, for `nemo-patches diagnose`."""
