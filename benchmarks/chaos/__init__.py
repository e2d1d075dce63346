"""Chaos: a cluster as `baton up` starts it, under load, while its processes and links are broken.

`python -m benchmarks.chaos` and the suite's own short run are the same code.
"""
