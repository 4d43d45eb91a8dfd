"""Who gets the request: pure functions over a snapshot of the fleet."""
