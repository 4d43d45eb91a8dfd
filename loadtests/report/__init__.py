"""Results of simulations and replays as one HTML page that needs nothing else, and as PNG files."""
