"""The learner: advantages, losses, off-policy corrections, packing, the training step."""
