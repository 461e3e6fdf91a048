"""Imported by setting: deferred metrics, loaders that end together, checkpoints that rank 0 decides."""
