"""Days, GPU-hours, cost and energy of a training at the throughput of a table."""
