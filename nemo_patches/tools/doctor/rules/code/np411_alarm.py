"""An alarm of the signal module around a collective, as a timeout for it.

Many recipes advise it. Python runs a signal's handler in the main thread, between two instructions
of its own: a collective waits in C++, so the handler runs after it has returned. A rank that waits
for ever waits for ever, and one that was only late loses a result that all others have.
Link: https://docs.python.org/3/library/signal.html#execution-of-python-signal-handlers
"""

# No check: the interpreter finds it, not without a handler of Python, as the alarm then ends the
# process, also in C++.

BAD = """\
import signal
import torch.distributed as dist

def reduce(value, handler):
    signal.signal(signal.SIGALRM, handler)
    signal.alarm(10)
    dist.all_reduce(value)
    signal.alarm(0)
"""
GOOD = BAD.replace(
    "    dist.all_reduce(value)\n    signal.alarm(0)",
    "    value += measured()\n    signal.alarm(0)\n    dist.all_reduce(value)",
)
