"""What can be asked for: flags, YAML keys, presets."""
