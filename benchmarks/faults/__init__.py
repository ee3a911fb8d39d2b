"""Faults for real runs: drawn from a seed, injected from outside, and kept account of."""
