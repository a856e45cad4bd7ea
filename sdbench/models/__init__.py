"""The networks as plain torch modules, and their parameters, FLOPs and memory."""
