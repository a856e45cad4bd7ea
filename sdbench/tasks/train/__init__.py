"""The task of train.py: train a model for real."""
