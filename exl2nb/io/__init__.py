"""Floor 3: files: safetensors, shards, hub, config."""
