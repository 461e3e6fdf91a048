"""Rules on a training config, NP1xx, and on reading it, NP0xx: each takes a Job."""
