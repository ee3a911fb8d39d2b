"""Suites: prompts that a policy is evaluated on, how they are answered, and figures of the answers.

Shared by runs, which evaluate their versions, and by `rhymeflow eval`, so that both mean the same.
Loads no torch. Knows nothing of how answers and rewards come about.
"""
