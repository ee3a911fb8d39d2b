"""A policy on its own: evaluated on suites (`rhymeflow eval`), and tried (`rhymeflow generate`).

One process with the native engine in it, and processes for rewards and environments. There is no
run: no coordinator, no store, no weights that change.
"""
