"""The diffs for teams that vendor NeMo: the edit of NeMo's files, a checkout, and the command."""
