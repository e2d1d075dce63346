"""What the router learns of workers and traffic: synchronous cores, without clocks."""
