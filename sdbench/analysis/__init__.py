"""Comparisons, ladders, tables and pages from the records of many runs. Needs no torch."""
