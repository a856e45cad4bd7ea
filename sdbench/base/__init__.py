"""What every room may use: errors, files, progress, secrets, stop signals, caches, escapes."""
