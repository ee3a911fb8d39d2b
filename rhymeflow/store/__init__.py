"""The trajectory store: every event and every token of a run."""
