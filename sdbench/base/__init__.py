"""Used by all rooms: errors, files, progress, secrets, stop signals, caches, escapes."""
