"""Making data sets, and checking them."""
