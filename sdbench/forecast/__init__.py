"""What a run would take, before it: memory, images/s, and the cost of a training."""
