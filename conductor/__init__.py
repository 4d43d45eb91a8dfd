"""Where the prefixes are: keys and the index of who holds them."""
