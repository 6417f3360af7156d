"""Floor 5: perplexity and divergence."""
