"""Something in the config was not read, so the rules that need it could not be checked.

For example an input_cfg in a file that is not on this machine, a value that only a variable of the
job's machine gives, a class or a type of input of your own. The finding names the rules that apply
for one of the possible values: otherwise a run without findings would wrongly say that nothing is
wrong. A value that is still to be given (???), or that can only be counted on a machine with the
data, is a note.
Link: docs/doctor.md
"""

from nemo_patches.tools.doctor.finding import WARNING

WORST = WARNING
# No check: not_judged.py, which knows what the other rules find, reports it.
