"""Floor 1: errors, options, progress, environment. Standard library only."""
