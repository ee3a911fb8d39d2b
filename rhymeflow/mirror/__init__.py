"""A copy of a run in shared or object storage, from which it goes on on another machine."""
