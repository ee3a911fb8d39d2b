"""What a run generated, as rows for other programs: trajectories, SFT rows, preference pairs."""
