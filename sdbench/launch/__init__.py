"""Starts measuring commands in fresh processes and says how they ended. Needs no torch."""
