"""Floor 3: sampling parameters and filters."""
