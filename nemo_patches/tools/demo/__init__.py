"""`nemo-patches demo`:
trains stock NeMo and NeMo with nemo_patches on this machine's CPU, and compares them.
"""
