"""Converting, verifying and writing data sets."""
