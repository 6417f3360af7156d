"""Floor 3: KV cache pages and storage."""
