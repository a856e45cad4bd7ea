"""Is this machine, or are these nodes, fit for an expensive job?"""
