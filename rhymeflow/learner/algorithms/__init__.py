"""Advantages and losses."""
