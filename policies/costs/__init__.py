"""What KV cache costs and saves: bytes, seconds and the rules between them. Pure functions, no I/O."""
