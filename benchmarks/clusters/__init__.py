"""Emulated runs, which the benchmarks `emulated` and `off_policy` measure."""
