"""One module for each format that samples are stored in."""
