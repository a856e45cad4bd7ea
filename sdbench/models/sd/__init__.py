"""Stable Diffusion 1 and 2."""
