"""Floor 5b: quantising models."""
