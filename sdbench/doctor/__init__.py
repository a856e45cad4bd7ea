"""Checks whether this machine, or each node of a job, is fit for an expensive job."""
