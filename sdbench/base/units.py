"""Units that records and messages use."""

BYTES_PER_GIB = 1024**3
