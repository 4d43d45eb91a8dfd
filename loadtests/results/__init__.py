"""What a run came to, simulated or live: figures, intervals, and the JSON they are kept in."""
