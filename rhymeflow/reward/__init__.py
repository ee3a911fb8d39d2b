"""Rewards: functions that score responses, and the pool of processes that calls them."""
