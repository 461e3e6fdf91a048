"""Rules on this machine and its Python environment, NP2xx: each takes a Machine."""
