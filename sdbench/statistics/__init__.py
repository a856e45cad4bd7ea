"""Intervals, comparisons and the law of a step: pure numbers."""
