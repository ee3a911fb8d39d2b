"""TRL's trainers, with its arguments: a `Trainer` whose configuration comes from one of TRL.

Each argument and field has its effect, is refused in one line that says what to do, or has no
effect, which a notice says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import trl
from accelerate import Accelerator
from huggingface_hub import ModelCard, ModelCardData
from transformers import TrainerCallback
from transformers.trainer_pt_utils import log_metrics
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from rhymeflow.config import RewardFunction
from rhymeflow.errors import UserError, counted, within
from rhymeflow.trainer import Trainer
from rhymeflow.trainer.callbacks import Rhythm
from rhymeflow.trainer.trainer import beside, latest
from rhymeflow.trl.fields import (
    GRPOConfig,
    RLOOConfig,
    TrlDistillationConfig,
    check_one_process,
    in_trl,
    own_fields,
    values_of,
)
from rhymeflow.trl.translate import (
    UNLIMITED_TURNS,
    RunLength,
    Values,
    adapter_fields,
    distillation,
    grpo,
    optimizer_steps,
    quantization_fields,
    rloo,
    run_fields,
    steps_in,
)

UNSUPPORTED: Mapping[str, str] = {
    "optimizers": "the learner makes its own AdamW; adam_*, learning_rate and lr_scheduler_type "
    "say how it steps",
    "rollout_func": "environment_factory and tools make responses of several turns "
    "(docs/environments.md)",
}
"""Arguments of TRL's trainer that are refused, and what to do instead."""


class GRPOTrainer(Trainer):
    """A trainer with the arguments, in the same order, and the attributes of TRL's `GRPOTrainer`.

    `args` is a `GRPOConfig` of this package or of TRL; docs/from-trl.md says what each field does.
    Reward functions are given as to `Trainer`, but a name is that of a reward model.
    """

    log_metrics = log_metrics
    of_trl: type = trl.GRPOTrainer
    config_class: type = GRPOConfig
    objective = staticmethod(grpo)
    """What of the configuration is optimized, as fields of the run."""
    _teacher: Any = None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[str | Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        **unknown: Any,
    ) -> None:
        title, config_class = self.of_trl.__name__, in_trl(self.config_class)
        unsupported = {"optimizers": any(optimizers or ()) or None, "rollout_func": rollout_func}
        for name, value in unsupported.items():
            if value is not None:
                raise UserError(f"{title}: {name} is not supported: {UNSUPPORTED[name]}")
        if unknown:
            hint = "; did you mean processing_class?" if "tokenizer" in unknown else ""
            raise UserError(f"{title}: takes no argument {', '.join(unknown)}{hint}")
        _check_overridden(type(self))
        _check_rows(train_dataset, title)
        check_one_process()
        if args is None:
            args = self.config_class(f"{_short_name(model)}-{title.removesuffix('Trainer')}")
        given, notices = values_of(args, config_class)
        with within(config_class.__name__):
            steps, num_rows = steps_in(given), _num_rows(train_dataset)
            max_steps = optimizer_steps(given, steps, num_rows)
            length = RunLength(steps, max_steps, num_rows)
            fields = run_fields(given, length) | self.objective(given)
        _check_evaluation(given, eval_dataset, title)
        if peft_config is not None:
            with within(title):
                fields |= adapter_fields(peft_config, notices)
        with within(title):
            fields |= quantization_fields(quantization_config, given, fields, notices)
        actual_steps = fields["learner.max_steps"] * steps.per_version
        if actual_steps != max_steps:
            notices.append(
                f"max_steps = {max_steps} would end within a generation batch; there will be "
                f"{actual_steps} steps"
            )
        if tools or environment_factory is not None:
            max_calls = given.get("max_tool_calling_iterations")
            fields["max_turns"] = UNLIMITED_TURNS if max_calls is None else max_calls + 1
        elif given.get("max_tool_calling_iterations") is not None:
            notices.append("max_tool_calling_iterations has no effect without tools")
        fields |= (own := own_fields(args))
        if not (reward_funcs or environment_factory or self._teacher or _judges(own)):
            raise UserError(f"{title}: reward_funcs is needed, or an environment_factory")
        super().__init__(
            model=model,
            reward_funcs=_reward_models(reward_funcs),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            config=fields,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            reward_weights=given.get("reward_weights"),
            teacher_model=self._teacher,
            environment_factory=environment_factory,
            tools=tools or None,
            callbacks=callbacks,
        )
        self.args, self.reward_funcs = args, reward_funcs
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.takes_best = bool(given["load_best_model_at_end"])
        self.hub = {
            "repo_id": given["hub_model_id"],
            "private": given["hub_private_repo"],
            "token": given["hub_token"],
            "revision": given["hub_revision"],
        }
        self._pushes = bool(given["push_to_hub"])
        if eval_dataset is not None and given["eval_strategy"] == "no":  # only for `evaluate`
            suites = [suite.model_copy(update={"steps": 0}) for suite in self.config.eval.suites]
            never = {"suites": tuple(suites)}
            self.config = self.config.changed(data={"eval_size": 0}, eval=never)
        self.rhythm = _rhythm(given, length)
        links = [CheckpointLinks(lambda: self.run_dir)]  # before a script's own `on_save`
        self._callbacks[:0] = links if given["save_strategy"] != "no" else []
        for notice in [*notices, *self._differences()]:
            print(f"rhymeflow: {notice}")

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: bool | str | Path | None = None, **_: Any
    ) -> TrainOutput:
        """Run to the end; see `Trainer.train`. If `output_dir` holds a run that is not resumed,
        this run gets a directory beside it."""
        if self.holds_a_run and not self.is_trained and not self.has(resume_from_checkpoint):
            self._choose_run_dir(resumes=bool(resume_from_checkpoint))
        summary = super().train(resume_from_checkpoint)
        loss = self.state.log_history[-1]["train_loss"]
        seconds = max(summary.seconds, 1e-9)
        metrics = {
            "train_runtime": summary.seconds,
            "train_samples_per_second": summary.trajectories / seconds,
            "train_steps_per_second": self.state.global_step / seconds,
            "train_loss": loss,
        }
        if self._pushes:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, loss, metrics)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the run directory."""
        self.state.save_to_json(str(self.run_dir / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    @property
    def hub_model_id(self) -> str:
        """The repository that the model is pushed to."""
        return str(self.hub["repo_id"] or self.run_dir.name)

    @cached_property
    def accelerator(self) -> Accelerator:
        """Accelerate's view of the script, which is one process and computes nothing itself."""
        return Accelerator(cpu=True)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `SPLIT_results.json` to the run directory, and add it to `all_results.json`."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        whole = self.run_dir / "all_results.json"
        (self.run_dir / f"{split}_results.json").write_text(_indented(metrics), encoding="utf-8")
        if combined:
            known = json.loads(whole.read_text(encoding="utf-8")) if whole.exists() else {}
            whole.write_text(_indented(known | metrics), encoding="utf-8")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write a model card, `README.md` of the run directory: what was trained on what."""
        base, learner = self.config.model.name, self.config.learner
        kind = self.of_trl.__name__.removesuffix("Trainer").lower()
        teacher = learner.distillation.teacher
        how = f"`learner.algorithm` {learner.algorithm}" if teacher is None else "a teacher"
        name = model_name or self.run_dir.name
        data = ModelCardData(
            model_name=name,
            base_model=None if Path(base).exists() or ":" in base else base,
            datasets=dataset_name,
            tags=sorted({"rhymeflow", kind, *([tags] if isinstance(tags, str) else tags or ())}),
            library_name="transformers",
        )
        text = (
            f"# {name}\n\n`{base}`, trained by Rhymeflow with {how} under a staleness of at most "
            f"{self.config.schedule.bound}, for {self.state.global_step} steps.\n"
        )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(self.run_dir / "README.md")

    def push_to_hub(
        self,
        *arguments: Any,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **named: Any,
    ) -> Any:
        """Write a model card, and upload it with the policy; see `Trainer.push_to_hub`."""
        self.create_model_card(model_name or Path(self.hub_model_id).name, dataset_name, tags)
        return super().push_to_hub(*arguments, **named)

    def end(self) -> None:
        """Do nothing: trackers end with the run."""

    def _differences(self) -> list[str]:
        """Return notices of how this run differs from one of TRL."""
        notices, title = [], in_trl(self.config_class).__name__
        for name in ("evaluate", "save_model"):
            if getattr(type(self), name) is not getattr(GRPOTrainer, name):
                notices.append(f"{type(self).__name__}.{name} is not called while training")
        if bound := self.config.schedule.bound:
            notices.append(
                f"training is asynchronous: responses may be {counted(bound, 'version')} old ("
                f"{title}(rhymeflow={{'schedule.name': 'synchronous'}}): none is)"
            )
        if names := self._inputs.by_value:
            notices.append(
                f"{', '.join(names)}: carried by value to the processes that run it; what it "
                "changes there is not changed here"
            )
        return notices

    def _choose_run_dir(self, resumes: bool) -> None:
        """Go to the newest run beside `output_dir` if `resumes`, else to a new directory there."""
        given = self.run_dir
        if resumes:
            if latest(given) != given:
                self._move(latest(given))
            return
        self._move(beside(given))
        print(
            f"rhymeflow: {given} holds a run already, this one goes to {self.run_dir} "
            "(train(resume_from_checkpoint=True) resumes the last one)"
        )


class CheckpointLinks(TrainerCallback):
    """Makes `checkpoint-N` in the run directory, where scripts and `get_last_checkpoint` look, a
    link to the checkpoint after step N."""

    def __init__(self, run_dir: Callable[[], Path]) -> None:
        self._run_dir = run_dir

    def on_save(self, args: Any, state: Any, control: Any, checkpoint: str = "", **_: Any) -> None:
        """Link a complete checkpoint; drop the links to those that were deleted."""
        run_dir = self._run_dir()
        for link in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            if not link.exists():
                link.unlink()
        link = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not link.exists():
            link.symlink_to(os.path.relpath(checkpoint, run_dir))


class RLOOTrainer(GRPOTrainer):
    """As `GRPOTrainer`, of TRL's `RLOOTrainer`; `args` is an `RLOOConfig`."""

    of_trl, config_class = trl.RLOOTrainer, RLOOConfig
    objective = staticmethod(rloo)


class DistillationTrainer(GRPOTrainer):
    """A trainer with the arguments of TRL's `DistillationTrainer`; `args` is a
    `DistillationConfig`. The teacher is a name or a model, by default the one that `args` names."""

    of_trl, config_class = trl.DistillationTrainer, TrlDistillationConfig
    objective = staticmethod(distillation)

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[str | Callable[..., Any]] | None = None,
        **unknown: Any,
    ) -> None:
        self._teacher = teacher_model or getattr(args, "teacher_model_name_or_path", None)
        if self._teacher is None:
            raise UserError("DistillationTrainer: teacher_model is needed, a name or a model")
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, None, callbacks,
            optimizers, quantization_config, peft_config, tools, **unknown,
        )  # fmt: skip


def _check_overridden(kind: type[GRPOTrainer]) -> None:
    """Raise `UserError` if a subclass overrides what TRL's trainer would call and this does not."""
    for each in kind.__mro__[: kind.__mro__.index(GRPOTrainer)]:
        for name, value in vars(each).items():
            is_called = callable(value) and not name.startswith("__")
            if is_called and hasattr(kind.of_trl, name) and not hasattr(GRPOTrainer, name):
                raise UserError(
                    f"{kind.of_trl.__name__}: {each.__name__} overrides {name}, which would never "
                    "be called: the learner is another process; learner.algorithm, and functions "
                    "for its parts, say what is optimized (docs/algorithms.md)"
                )


def _check_rows(dataset: Any, title: str) -> None:
    """Raise `UserError` if these are no rows to train on, or rows with images."""
    if dataset is None:
        raise UserError(f"{title}: train_dataset is needed")
    if isinstance(dataset, Mapping):
        raise UserError(
            f"{title}: train_dataset is a mapping of {', '.join(map(repr, dataset))}: give one part"
        )
    names = getattr(dataset, "column_names", None) or ()
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        names = dataset[0]
    for name in ("image", "images"):
        if name in names:
            raise UserError(
                f"{title}: train_dataset: column {name!r}: images are not supported; leave the "
                "column out if prompts are text"
            )


def _judges(own: Mapping[str, Any]) -> bool:
    """Whether fields of ours say what rewards responses."""
    return any(name.startswith(("reward.", "environment.", "functions")) for name in own)


def _check_evaluation(given: Values, eval_dataset: Any, title: str) -> None:
    """Raise `UserError` if evaluations are asked for, and there is nothing to evaluate on."""
    strategy = given["eval_strategy"]
    if eval_dataset is None and strategy != "no":
        raise UserError(f"{title}: eval_strategy = {strategy!r} needs an eval_dataset")
    has_several, metric = isinstance(eval_dataset, Mapping), given["metric_for_best_model"]
    if has_several and given["load_best_model_at_end"] and metric in ("reward", "eval_reward"):
        raise UserError(
            f"{title}: metric_for_best_model = {metric!r}: with several eval sets, give "
            "eval_NAME_reward of one"
        )


def _indented(metrics: Mapping[str, Any]) -> str:
    return json.dumps(metrics, indent=4, sort_keys=True)


def _rhythm(given: Values, length: RunLength) -> Rhythm:
    """Return how often `on_log` is called, and how steps and epochs are counted."""
    steps, every, strategy = length.steps, given["logging_steps"], given["logging_strategy"]
    per_epoch = length.num_rows / steps.groups_per_batch if length.num_rows else 0.0
    if strategy == "no":
        versions = 0
    elif strategy == "epoch":
        versions = max(1, round(per_epoch))
    else:
        versions = steps.versions(every if every >= 1 else length.max_steps * every)
    return Rhythm(versions, bool(given["logging_first_step"]), steps.per_version, per_epoch)


def _num_rows(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, str) else None


def _reward_models(reward_funcs: Any) -> Any:
    """Replace names by reward models of that name, as they are in TRL."""
    if isinstance(reward_funcs, list):
        return [_reward_models(reward) for reward in reward_funcs]
    if isinstance(reward_funcs, str):
        return RewardFunction(function="reward_model", options={"model": reward_funcs})
    return reward_funcs


def _short_name(model: Any) -> str:
    name = model if isinstance(model, str | Path) else getattr(
        getattr(model, "config", None), "_name_or_path", "")  # fmt: skip
    return Path(str(name)).name.replace(":", "-") or "model"
