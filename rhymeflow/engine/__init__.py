"""Rollout engines behind one interface: the native engine, and vLLM."""
