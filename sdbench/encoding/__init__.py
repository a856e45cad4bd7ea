"""Encoding a data set of images into one of latents."""
