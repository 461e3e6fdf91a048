"""The diffs for teams that vendor NeMo: the edit, its parts, a checkout, and the command."""
