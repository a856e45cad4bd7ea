"""The ranks of a run: their places, their communication, and the loss of one."""
