"""`Trainer`: the same run from Python objects, for a user of TRL's `GRPOTrainer`.

What is handed in as objects is written down or named, so that other processes can load it and the
run can be repeated. Reward functions, environments and tools run in processes of their own, by name
or carried over by value: what they change is changed there, and not in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config, RewardFunction
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.runtime import start
from rhymeflow.trainer.inputs import Inputs, Rows, frozen_in, is_stream, title_of
from rhymeflow.trainer.outcome import Outcome

if TYPE_CHECKING:
    from rhymeflow.observe.summary import Summary

Reward = str | Callable[..., Any] | RewardFunction
Environments = str | Callable[..., Any] | Mapping[str, Callable[..., Any]]


class Trainer(Outcome):
    """One run.

    `model` is a directory, a hub name (see `ModelConfig.name`), or a `PreTrainedModel`;
    `processing_class` is its tokenizer, if that is another one than the model's own. `reward_funcs`
    is one reward function or several: callables with TRL's signature, names as in
    `RewardFunction.function`, `RewardFunction`s with weights, or reward models as objects (with
    tokenizers in `reward_processing_classes`). `reward_weights` has a weight for each. Datasets are
    paths, hub names, or iterables of rows (a list of dicts, a `datasets.Dataset`, one that
    streams); with a `train_dataset` and no `eval_dataset` nothing is held out, as in TRL. A mapping
    of eval datasets has metrics for each. `environment_factory` is a class of which each response
    gets an object (or a function that makes one, or several of them by name), `tools` are functions
    that the policy may call: see docs/environments.md. `callbacks` are transformers'
    `TrainerCallback`s, which are called in this process.
    `config` is a `Config` or a mapping of its fields, for which the last name will do where only
    one field is so called: `{"learning_rate": 1e-5, "num_generations": 8}`.

        trainer = Trainer(model="some/model", reward_funcs=reward, train_dataset=rows,
                          config={"max_steps": 100})
        summary = trainer.train()
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        config: Config | Mapping[str, Any] | None = None,
        *,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        reward_weights: Sequence[float] | None = None,
        environment_factory: Environments | None = None,
        tools: list[str | Callable[..., Any]] | None = None,
        callbacks: list[Any] | None = None,
    ) -> None:
        given = _config(config)
        path = start.choose_run_dir(given)
        inputs = Inputs(path)
        fields: dict[str, Any] = {"run.output_dir": str(path)}
        if model is not None:
            fields["model.name"] = inputs.model(model, processing_class)
            if frozen := frozen_in(model):
                names = dict.fromkeys([*given.learner.frozen_parameters, *frozen])
                fields["learner.frozen_parameters"] = list(names)
            if processing_class is not None and isinstance(model, str | Path):
                fields["model.tokenizer"] = inputs.tokenizer(processing_class)
        if environment_factory is not None and reward_funcs is None:
            fields["reward.functions"] = []
        fields |= _judges(
            inputs, reward_funcs, reward_weights, reward_processing_classes, environment_factory
        )
        if tools is not None:
            fields["environment.tools"] = [inputs.name(each, "the tool") for each in tools]
        if train_dataset is not None:
            fields |= _train_fields(inputs, train_dataset, given)
        if eval_dataset is not None:
            fields |= _eval_fields(inputs, eval_dataset, given)
        made = build_config(fields, given, where="Trainer")
        super().__init__(made, inputs, model, processing_class, callbacks or [])
        self._is_named = given.run.output_dir is not None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Summary:
        """Run to the end and return the summary; the run directory is `self.run_dir`.

        A second call trains on from what the first came to, as a run of its own, in a directory
        beside the first one's. `resume_from_checkpoint`: go on with the run that `run.output_dir`
        holds, as `rhymeflow resume` does, under this configuration; a checkpoint's path means the
        run that it is of. A `UserError` before the first step leaves no run directory.

        Nothing is written before, so of several trainers with one `run.output_dir` the first that
        trains has it, and another is refused.
        """
        from rhymeflow.runtime.train import train

        if resume_from_checkpoint:
            return self._resume(resume_from_checkpoint)
        if self.is_trained:
            self._begin_again()
        config = self.config
        if not self._is_named:  # else another run may have taken the name meanwhile
            run = config.run.model_copy(update={"output_dir": None})
            config = config.model_copy(update={"run": run})
        return self._watched(partial(train, config, begin=self._begin))

    def _begin(self, run_dir: Path) -> Config:
        if run_dir != self.run_dir:
            self._move(run_dir)
        self._has_begun = self._is_named = True
        if self._inputs.folder.parent == run_dir or not self._inputs.folder.exists():
            self._inputs.write()
        return self.config

    def _go_on(self, run_dir: Path) -> None:
        self._inputs.write(begun=True)
        self._has_begun = True

    def _resume(self, resume_from_checkpoint: bool | str) -> Summary:
        from rhymeflow.runtime.resume_options import with_values
        from rhymeflow.runtime.train import resume

        if isinstance(resume_from_checkpoint, str):
            named = Path(resume_from_checkpoint).resolve()
            if self.run_dir.resolve() not in (named, *named.parents):
                raise UserError(
                    f"Trainer: resume_from_checkpoint = {resume_from_checkpoint!r}: is not of the "
                    f"run in {self.run_dir}"
                )
        change = partial(with_values, given=self.config)
        return self._watched(partial(resume, self.run_dir, change, begin=self._go_on))

    def _watched(self, run: Callable[..., Summary]) -> Summary:
        observer = self._callback_observer() if self._callbacks else None
        try:
            summary = run(observer=observer)
        finally:
            self._has_begun = self._has_begun and self.holds_a_run
            self._forget()
        self._after_training(summary.seconds)
        if observer is not None:
            observer.end()
        return summary


def _judges(
    inputs: Inputs,
    reward_funcs: Any,
    weights: Sequence[float] | None,
    tokenizers: Any,
    environments: Environments | None,
) -> dict[str, Any]:
    several = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    several = [each for each in several if each is not None]
    if weights is not None and len(weights) != len(several):
        raise UserError(
            f"Trainer: {len(weights)} reward_weights are given for {len(several)} reward_funcs"
        )
    given_weights: Sequence[float | None] = weights or [None] * len(several)
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(several)
    if len(tokenizers) != len(several):
        raise UserError(
            f"Trainer: {len(tokenizers)} reward_processing_classes are given for "
            f"{len(several)} reward_funcs"
        )
    apart: list[tuple[Any, float]] = []
    functions = []
    for given, weight, tokenizer in zip(several, given_weights, tokenizers, strict=True):
        if environments is not None and _judges_inside(given):
            apart.append((given, weight or 1.0))
        else:
            functions.append(reward_function(given, inputs, weight, tokenizer))
    fields: dict[str, Any] = {}
    if several:
        fields["reward.functions"] = [each.model_dump(mode="json") for each in functions]
    if environments is not None:
        fields["environment.classes"] = _environments(inputs, environments, apart)
    return fields


def _environments(
    inputs: Inputs, given: Environments, judged_inside: list[tuple[Any, float]]
) -> list[dict[str, Any]]:
    from rhymeflow.environments.judged import judged_by

    found = []
    for name, each in given.items() if isinstance(given, Mapping) else [(None, given)]:
        made = each
        if judged_inside:
            if isinstance(each, str):
                raise UserError(
                    f"Trainer: environment_factory {each!r} is a name; give the class itself "
                    "where a reward function takes `environments`"
                )
            made = judged_by(each, judged_inside)
            if len(judged_inside) == 1 and name is None:
                name = title_of(judged_inside[0][0])
        spec = inputs.name(made, "environment_factory")
        found.append({"environment": spec} | ({} if name is None else {"name": name}))
    return found


def _judges_inside(given: Any) -> bool:
    from rhymeflow.environments.judged import wants_environments

    return not isinstance(given, str | RewardFunction) and wants_environments(given)


def reward_function(
    given: Any, inputs: Inputs, weight: float | None = None, tokenizer: Any = None
) -> RewardFunction:
    """What section `reward` says of a reward function, a reward model, or a name of one.

    A `functools.partial` with keywords becomes the function's `options`.
    """
    if isinstance(given, RewardFunction):
        named = given
    elif isinstance(given, str):
        named = RewardFunction(function=given)
    elif hasattr(given, "save_pretrained"):
        model = inputs.reward_model(given, tokenizer)
        named = RewardFunction(function="reward_model", options={"model": model})
    elif isinstance(given, partial) and not given.args and _is_json(given.keywords):
        inner = reward_function(given.func, inputs)
        named = inner.model_copy(update={"options": inner.options | given.keywords})
    else:
        named = RewardFunction(function=inputs.name(given, "the reward function"))
    return named if weight is None else named.model_copy(update={"weight": float(weight)})


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False


def _train_fields(inputs: Inputs, dataset: Rows, config: Config) -> dict[str, Any]:
    """Of a dataset that streams, as many rows are taken as the run trains on."""
    needed = config.learner.max_steps * config.learner.groups_per_batch
    source, _ = inputs.rows(dataset, "train", needed if is_stream(dataset) else None)
    return {"data.source": source, "data.options": {}, "data.eval_size": 0}


def _eval_fields(
    inputs: Inputs, dataset: Rows | Mapping[str, Rows], config: Config
) -> dict[str, Any]:
    if not isinstance(dataset, Mapping):
        path, num_rows = inputs.rows(dataset, "eval")
        return {"data.eval_source": path, "data.eval_size": num_rows or config.data.eval_size}
    suites = []
    for name, each in dataset.items():
        path, _ = inputs.rows(each, f"eval-{name}")
        steps = config.run.eval_steps or config.learner.max_steps  # as of the held-out prompts
        suites.append({"name": str(name), "source": path, "steps": steps})
    return {"data.eval_size": 0, "eval.suites": suites}


def _config(given: Config | Mapping[str, Any] | None) -> Config:
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return build_config(given, where="Trainer")
    raise UserError(
        f"Trainer: config is a {type(given).__name__}; give a rhymeflow.Config or a mapping of "
        'fields, such as {"learning_rate": 1e-5}; rhymeflow.trl.GRPOTrainer takes a GRPOConfig'
    )
