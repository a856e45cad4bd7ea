"""What is done: pre-training, encoding a data set, profiling a step."""
