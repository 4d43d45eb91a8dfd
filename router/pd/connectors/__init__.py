"""One small class for each way in which engines hand KV over."""
