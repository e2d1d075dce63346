"""Where an attempt goes, and what that decision needs to know: synchronous cores."""
