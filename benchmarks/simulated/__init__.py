"""Benchmarks on simulated clusters: the search for the best split of devices, and all schedules."""
