"""Uneven batches: ranks that end a pass over their data together, and metrics that are summed once. Opt-in."""
