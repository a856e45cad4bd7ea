"""The ranks of a run: their numbers, communication, and heartbeat."""
