"""Floor 3: params, filters and the chain from logits to a token."""
