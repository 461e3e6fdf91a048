"""Readers: one for each source; they return facts and judge nothing."""
