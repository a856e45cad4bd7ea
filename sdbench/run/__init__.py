"""Runs a task: the runner, the outcome of a run, and its progress and logs."""
