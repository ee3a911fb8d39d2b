"""Rewards: which functions judge a response, and how they are run without trusting them.

Knows nothing of groups, versions or advantages. An error is never a reward.
"""

from rhymeflow.reward.executor import RewardDone, RewardError, RewardExecutor
from rhymeflow.reward.messages import RewardRequest

__all__ = ["RewardDone", "RewardError", "RewardExecutor", "RewardRequest"]
