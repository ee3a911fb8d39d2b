"""Rewards: which functions judge a response, and how a pool of processes calls them."""
