"""A rule of the doctor itself failed on this config.

The rule could not check this config. Please report it, with the config.
Link: docs/doctor.md
"""
# No check: the run itself reports a rule that raises.
