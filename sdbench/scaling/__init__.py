"""Throughput against GPU count, and the days, money and energy that follow from it."""
