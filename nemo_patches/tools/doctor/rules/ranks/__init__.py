"""Rules on what the ranks of a job tell each other, NP3xx: each takes the Ranks."""
