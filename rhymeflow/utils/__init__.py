"""Helpers for the operating system and the interpreter, independent of training."""
