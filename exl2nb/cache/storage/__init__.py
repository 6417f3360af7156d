"""One file per cache mode."""
