"""Logs of runs, made up."""
