"""Running a plan: its outcome, progress and logs."""
