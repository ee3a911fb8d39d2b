"""The configuration in force: what a field leaves to others, as the value that it then has.

`config.yaml` of a run and its log hold this. A null in them is a value of its own: none, off, or no
limit. Two steps, so that workers need not wait for what takes loading.

Holds true: a run of the result is the same run. Section `simulation` is left as it is: nothing of
it is in force where something is trained.
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.data.encode import Tokenizer
from rhymeflow.models.load import load_config, resolve_device, resolve_dtype
from rhymeflow.runtime.supervisor import share_of_cores


def before_the_start(config: Config, run_dir: Path) -> Config:
    """What the configuration decides by itself, or the run's place and the machine do."""
    learner, rollout = config.learner, config.rollout
    share = share_of_cores(1 + rollout.num_instances)
    sizes = {len(cpus) for cpus in rollout.cpus or ()}
    own_size = sizes.pop() if len(sizes) == 1 else None  # else each has as many as `cpus` says
    epsilon_high = learner.epsilon if learner.epsilon_high is None else learner.epsilon_high
    return config.model_copy(
        update={
            "schedule": build.rules_in_force(config.schedule),
            "run": config.run.model_copy(update={"output_dir": str(run_dir)}),
            "learner": learner.model_copy(
                update={
                    "epsilon_high": epsilon_high,
                    "num_threads": learner.num_threads or len(learner.cpus or ()) or share,
                }
            ),
            "rollout": rollout.model_copy(
                update={"num_threads": rollout.num_threads or (own_size if rollout.cpus else share)}
            ),
        }
    )


def of_the_model(config: Config, tokenizer: Tokenizer) -> Config:
    """What the model and its tokenizer decide, too.

    Raises:
        UserError: there is no such model, or not the device that is asked for.
    """
    device, rollout, data = resolve_device(config.model), config.rollout, config.data
    dtype = str(resolve_dtype(config.model, device)).removeprefix("torch.")
    longest = load_config(config.model).max_position_embeddings
    has_template = bool(tokenizer.chat_template)
    wraps = has_template if data.chat_template is None else data.chat_template
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"device": device.type, "dtype": dtype}),
            "data": data.model_copy(update={"chat_template": wraps}),
            "rollout": rollout.model_copy(
                update={"max_kv_tokens": rollout.max_kv_tokens or rollout.max_num_seqs * longest}
            ),
        }
    )
