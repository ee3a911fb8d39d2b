"""The engine of an instance, by the configuration.

Holds true: only the engine that is wanted is imported, with the libraries that it needs.
"""

from __future__ import annotations

from functools import partial

from rhymeflow.config import Config
from rhymeflow.engine.base import Engine
from rhymeflow.histospec.configured import drafter, rehearse
from rhymeflow.weights.base import WeightReader


def prepare(config: Config) -> None:
    """Load the code that the engine will run, or compile it."""
    if config.rollout.engine == "vllm":
        from rhymeflow.engine.vllm.llm import import_vllm

        import_vllm()
        if config.drafting.window != "off":
            rehearse(config)  # the history process compiles for another Python
        return
    from rhymeflow.engine.native.native_engine import load_kernels

    load_kernels(config)


def make_engine(config: Config, weights: WeightReader, name: str) -> Engine:
    """The engine of instance `name`; it begins with the newest weights."""
    drafts = partial(drafter, config)
    if config.rollout.engine == "vllm":
        from rhymeflow.engine.vllm.vllm_engine import VllmEngine

        return VllmEngine(config, weights, instance=name, drafter_for=drafts)
    from rhymeflow.engine.native.native_engine import NativeEngine

    return NativeEngine(config, weights, instance=name, drafter_for=drafts)
