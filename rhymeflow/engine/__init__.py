"""The native rollout engine: continuous batching of unconverted Hugging Face models."""
