"""vLLM behind `engine/base.py`. Only modules of this package import vLLM, and late."""
