"""vLLM as a `RolloutEngine`. Only this package imports vLLM, inside functions."""
