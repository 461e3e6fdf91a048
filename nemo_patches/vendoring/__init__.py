"""The diffs for teams that vendor NeMo: the edit, a checkout, the command."""
