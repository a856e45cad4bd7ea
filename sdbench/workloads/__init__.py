"""What job is trained? A workload joins models and sources into the parts that an engine runs."""
