"""What `rhymeflow bench NAME` runs: one module a benchmark, `harness.py` what they share.

A benchmark module has a docstring (its first line is shown by `rhymeflow bench`),
`add_arguments(parser)` and `run(args) -> dict`, which ends in `harness.report`.
"""
