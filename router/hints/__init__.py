"""What engines are told beside the request: what to keep of it, and where to pull its KV from."""
