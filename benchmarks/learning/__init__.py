"""Pieces of benchmarks that ask how well a policy learns, not how fast a run is."""
