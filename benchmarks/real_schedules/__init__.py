"""Pieces of `rhymeflow bench schedules` that train for real: each module is one subject."""
