"""TRL's reward functions, for scripts that import them from `trl.rewards`."""

from trl.rewards import *  # noqa: F403
