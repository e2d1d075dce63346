"""Load clients that others wrote, as they are, against a real cluster: `python -m benchmarks.clients`."""
