"""Ranks of a run: their places, their exchange, their heartbeats."""
