"""Load on a running cluster, and what it measures.

`baton bench` is its command line; benchmarks/ uses parts of it. What its figures mean is in docs/cli.md.
"""
