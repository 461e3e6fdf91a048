"""Runs inside training: the bounded length sync, and private growth of length-sized buffers. torch and stdlib only."""
