"""What the recipe `demo` ships: its task, a tiny warm-started checkpoint, and how it was made."""
