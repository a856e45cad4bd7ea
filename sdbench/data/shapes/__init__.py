"""Procedural pictures of coloured shapes with captions: to draw them, and to judge drawn ones."""
