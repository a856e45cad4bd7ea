"""What is trained? Plain torch modules that know no trainer, their size and their work."""
