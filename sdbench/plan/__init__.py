"""Turns a request into a plan for this machine and these ranks."""
