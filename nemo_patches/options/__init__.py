"""Imported by setting: deferred metrics, loaders that end together, rank 0's checkpoints."""
