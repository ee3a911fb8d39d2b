"""What the recipe `smollm2_tools` ships: its tool."""
