"""The programs that start a task: commands of `python -m sdbench`, and those at the top."""
