"""From a request to the exact token ids its engine will prefill, or the reason why they cannot be known."""
