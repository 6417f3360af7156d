"""Floor 3: weight formats."""
