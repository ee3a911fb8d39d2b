"""Unconverted Hugging Face models: where they are, how they load, how their attention plugs in."""
