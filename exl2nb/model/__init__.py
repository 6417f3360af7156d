"""Floor 4: architectures and the forward pass."""
