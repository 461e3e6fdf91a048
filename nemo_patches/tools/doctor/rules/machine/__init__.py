"""Rules on this machine's variables of NCCL and torch, NP2xx: each takes a Machine."""
