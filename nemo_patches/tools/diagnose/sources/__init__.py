"""Readers: each turns one kind of file into facts, and judges nothing."""
