"""Other systems, each run in a process of its own on the same configuration."""
