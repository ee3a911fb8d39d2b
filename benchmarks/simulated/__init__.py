"""What the benchmarks of simulated clusters share: cases, and the search for their best split."""
