"""How do the templates of multi-node/ become a job that can be started? Needs no torch."""
