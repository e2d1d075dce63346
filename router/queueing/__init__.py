"""Who goes first: synchronous cores."""
