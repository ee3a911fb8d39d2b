"""Evaluates a policy on suites (`rhymeflow eval`), and answers prompts (`rhymeflow generate`)."""
