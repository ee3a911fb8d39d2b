"""Other systems on the same work, each in a process of its own, some in their own environment."""
