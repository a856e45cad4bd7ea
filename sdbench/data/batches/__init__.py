"""Batches: decoded, shaped and assembled."""
