"""Stable Diffusion XL."""
