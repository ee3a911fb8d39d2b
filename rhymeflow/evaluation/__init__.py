"""A policy evaluated on suites (`rhymeflow eval`), and tried (`rhymeflow generate`)."""
