"""Model weights by version: from the learner to the rollout instances, proved on arrival."""
