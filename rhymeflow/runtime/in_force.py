"""The configuration in force: what a field leaves to others, as the value that it then has.

`config.yaml` of a run and its log hold this; a null in them is a value of its own: none, off, or no
limit. It comes in steps, as things are loaded, so that workers need not wait for it. Section
`simulation` is left as it is.
"""

from __future__ import annotations

import os
from pathlib import Path

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.data.encode import Tokenizer
from rhymeflow.data.load import RunPrompts
from rhymeflow.runtime.supervisor import num_computing, share_of_cores
from rhymeflow.workers.messages import Model


def before_the_start(config: Config, run_dir: Path) -> Config:
    """What the configuration decides by itself, or the run's place and the machine do."""
    learner, rollout, history_run = config.learner, config.rollout, config.drafting.history_run
    epsilon_high = learner.epsilon if learner.epsilon_high is None else learner.epsilon_high
    # Of how many cores a cluster's nodes have nothing is known.
    share = share_of_cores(num_computing(config)) if config.runtime == "local" else 1
    cpus_of_rank = len(learner.cpus or ()) // learner.num_ranks
    sizes = {len(cpus) for cpus in rollout.cpus or ()}
    own_size = sizes.pop() if len(sizes) == 1 else None  # else each has as many as `cpus` says
    decided = config.model_copy(update={"schedule": build.rules_in_force(config)})
    return decided.changed(
        run={"output_dir": str(run_dir)},
        learner={
            "epsilon_high": epsilon_high,
            "num_threads": learner.num_threads or cpus_of_rank or share,
        },
        drafting={"history_run": history_run and os.path.abspath(history_run)},
        rollout={
            "num_threads": rollout.num_threads or (own_size if rollout.cpus else share),
            "python": rollout.python and os.path.abspath(rollout.python),
        },
    )


def once_loaded(config: Config, tokenizer: Tokenizer, prompts: RunPrompts) -> Config:
    """What the data and the tokenizer decide, too."""
    given, found = config.data.chat_template, dict[str, object]()
    found["chat_template"] = bool(tokenizer.chat_template) if given is None else given
    if config.learner.is_used:
        found |= {"size": len(prompts.train), "eval_size": len(prompts.held_out)}
    return config.changed(data=found)


def with_the_model(config: Config, ready: Model) -> Config:
    """What the learner says of the model that it has, too; instances have the same.

    vLLM's cache has the size that it finds memory for.
    """
    rollout = config.rollout
    capacity = rollout.max_kv_tokens
    if rollout.engine == "native":
        capacity = capacity or rollout.max_num_seqs * ready.max_length
    found: dict[str, object] = {"device": ready.device, "dtype": ready.dtype}
    return config.changed(model=found, rollout={"max_kv_tokens": capacity})
