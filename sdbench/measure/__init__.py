"""Measures a run: times, memory, and the machine."""
