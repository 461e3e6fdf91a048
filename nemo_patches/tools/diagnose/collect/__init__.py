"""Samples of the ranks that run on this host, taken from outside.

The standard library only: it is also one .pyz.
"""
