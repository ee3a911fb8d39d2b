"""The learner: advantages, losses, corrections, packing, the training step."""
