"""Which operators does a training step spend its time in, and how far is each from its ceiling?"""
