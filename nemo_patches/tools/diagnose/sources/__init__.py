"""One reader a source: each returns facts with where it says so, and judges nothing."""
