"""Recorded rollouts: made by real runs, kept in `.npz` files, replayed token by token."""
