"""The few lines that two processes must share: control messages, and the group over which weights travel."""
