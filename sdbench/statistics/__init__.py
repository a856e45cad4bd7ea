"""Intervals and comparisons: pure numbers."""
