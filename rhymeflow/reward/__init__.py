"""Rewards: which functions judge a response, and how they are run without trusting them.

A worker in this package is a process that runs the functions (`worker.py`); the executor that
starts them is part of the run's reward worker (`workers/reward.py`).

Knows nothing of groups, versions or advantages. An error is never a reward.
"""
