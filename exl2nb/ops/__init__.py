"""Floor 2: ops with schema, fake kernel and fp32 reference; compiled kernels take over when loaded."""
