"""Rules on a model's own code, NP4xx: each takes a Code."""
