"""Benchmarks. Each is a module with `--json PATH`; dated results are kept in benchmarks/results/."""
