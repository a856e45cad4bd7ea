"""Results as one table: `load` gives all figures of a folder to a notebook."""

from sdbench.results.frame import load

__all__ = ["load"]
