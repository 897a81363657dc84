"""The two kinds of errors of this package; every error class of its own is one of them.

    UserError   the user can fix it: a value, a file, a command. The command line prints the message alone.
    RunError    a run met a fault: a process, a server, a disk, a peer. The command line prints the message and where the log is.

A message names the value, the rule and the remedy. Any other exception is a bug: it ends with its traceback.
"""


class UserError(Exception):
    """What a user can fix."""


class RunError(Exception):
    """A fault of a running program or of its machines."""
