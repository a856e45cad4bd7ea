"""The order in which samples are read."""
