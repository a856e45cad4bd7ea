"""Training: the jobs of models, and the task of train.py."""
