"""Transfers model weights by version from the learner to rollout instances, with proof."""
