"""Plans for clusters: what runs where, its memory and its rates."""
