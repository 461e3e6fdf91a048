"""Records of encoder calls on each rank, for `nemo-patches diagnose`. Not vendored by the diffs."""
