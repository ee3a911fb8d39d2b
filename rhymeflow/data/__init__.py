"""Prompts: where they come from, in which order they are requested, how they become tokens."""
