"""Section `model`: the policy."""

from __future__ import annotations

from typing import Literal

from rhymeflow.config.section import Section


class ModelConfig(Section):
    """The policy."""

    by_name = "name"

    name: str = "recipe:demo"
    """A local directory, a Hugging Face hub name, `package:NAME` (weights that an installed Python
    package carries) or `recipe:NAME` (weights shipped with a recipe)."""
    tokenizer: str | None = None
    """Where the tokenizer is, a directory or a hub name, if it is not the model's own."""
    gguf_file: str | None = None
    """The GGUF file inside the directory or package, if the weights are in that format."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision of engine and learner. `auto`: bfloat16 on CUDA and on CPUs with bfloat16
    arithmetic, float32 elsewhere and for models under 20 million parameters. The learner's master
    weights are float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
