"""What the recipe `distill` ships: a tiny teacher for the demo's model, and how it was made."""
