"""Where data are, and how they are fetched."""
