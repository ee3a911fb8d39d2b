"""Exports a run's responses as rows: trajectories, SFT rows or preference pairs."""
