"""What every room may use: errors, secrets, stop signals, caches, escapes of text."""
