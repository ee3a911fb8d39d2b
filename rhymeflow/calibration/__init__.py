"""How fast this machine is with a run's model: measured by the run's own engine and learner."""
