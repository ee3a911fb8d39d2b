"""The coordinator: a deterministic state machine on the standard library alone."""
