"""What outlives a process: checkpoints of a run, and the lock of its folder."""
