"""The command line, and the start of a run on this machine."""
