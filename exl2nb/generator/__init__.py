"""Floor 5: the step loop."""
