"""Engines against each other on one CPU: `python -m benchmarks.engine`."""
