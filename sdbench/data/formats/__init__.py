"""The formats of data sets: what is in their files, and what identifies them."""
