"""Measures a run: its times, its memory, its machine."""
