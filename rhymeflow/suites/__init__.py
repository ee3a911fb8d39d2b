"""Suites: prompts that a policy is evaluated on, how they are answered, and their figures."""
