"""Profile of a training step: time of each operator, and how far that is from its ceiling."""
