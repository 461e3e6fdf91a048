"""Readers, one a source: each returns facts with citations, and judges nothing."""
