"""Floor 3: files: safetensors, shards, atomic writes, config.json, the hub."""
