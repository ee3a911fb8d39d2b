"""What runs in child processes: a rollout instance, the learner, history; and their messages."""
