"""`Trainer`: a run from Python objects, with the interface of TRL's `GRPOTrainer`.

Objects are written to files or referred to by name, so that other processes can load them and the
run can be repeated. Reward functions, environments and tools run in other processes; state that
they change there does not change in this process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config, EvalSuite, LoraConfig
from rhymeflow.config.fields import Origin, check_effect, check_unread, validate
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.store.checkpoint_dirs import is_url, paths_of
from rhymeflow.store.schema import EVENTS
from rhymeflow.suites.figures import OF_FUNCTION
from rhymeflow.trainer.callbacks import Callbacks, History, Rhythm, eval_name
from rhymeflow.trainer.inputs import (
    Environments,
    Inputs,
    Rows,
    eval_fields,
    frozen_in,
    reward_fields,
    train_fields,
)

if TYPE_CHECKING:
    from rhymeflow.observe.summary import Summary


class Trainer:
    """One run.

    Args:
        model: a directory, a hub name (see `ModelConfig.name`), or a `PreTrainedModel`.
        reward_funcs: one or several callables with TRL's signature, names as in
            `RewardFunction.function`, `RewardFunction`s, or reward models as objects.
        train_dataset: a path, a hub name, or an iterable of rows (a list of dicts, or a
            `datasets.Dataset`, also a streaming one).
        eval_dataset: likewise, or a mapping of several by name, with metrics for each. Without it
            nothing of a `train_dataset` is held out, as in TRL.
        config: a `Config`, or a mapping of its fields. A field whose last name is unique needs no
            section: `{"learning_rate": 1e-5, "num_generations": 8}`.
        processing_class: the model's tokenizer, if not its own.
        reward_processing_classes: the tokenizer of a reward model given as an object, or a list
            with an entry for each of `reward_funcs`.
        reward_weights: a weight for each of `reward_funcs`.
        environment_factory: a class, of which each response gets an object, a function that makes
            one, or several of these by name (docs/environments.md).
        tools: functions that the policy may call.
        callbacks: transformers' `TrainerCallback`s, called in this process.
        teacher_model: that of `learner.distillation.teacher`, by name or as an object.

        trainer = Trainer(model="some/model", reward_funcs=reward, train_dataset=rows,
                          config={"max_steps": 100})
        summary = trainer.train()
    """

    rhythm = Rhythm()
    """How metrics become `state.log_history`."""
    takes_best = False
    """Whether `model` is the checkpoint with the best `run.best_metric` instead of the newest."""
    hub: Mapping[str, Any] = {}
    """Default arguments of `push_to_hub`."""

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
        teacher_model: Any = None,
    ) -> None:
        from rhymeflow.runtime.start import choose_run_dir  # loads the store

        given = _config(config)
        run_dir = choose_run_dir(given)
        inputs = Inputs(run_dir)
        fields: dict[str, Any] = {"run.output_dir": str(run_dir)}
        if model is not None:
            fields["model.name"] = inputs.model(model, processing_class)
            if not given.model.lora.is_used and (frozen := frozen_in(model)):
                names = dict.fromkeys([*given.learner.frozen_parameters, *frozen])
                fields["learner.frozen_parameters"] = list(names)
            if processing_class is not None and isinstance(model, str | Path):
                fields["model.tokenizer"] = inputs.saved("tokenizer", processing_class)
        if teacher_model is not None:
            teacher = inputs.teacher(teacher_model, processing_class)
            fields["learner.distillation.teacher"] = teacher
        if environment_factory is not None and reward_funcs is None:
            fields["reward.functions"] = []
        fields |= reward_fields(
            inputs, reward_funcs, reward_weights, reward_processing_classes, environment_factory
        )
        if tools is not None:
            fields["environment.tools"] = [inputs.name(tool, "the tool") for tool in tools]
        if train_dataset is not None:
            fields |= train_fields(inputs, train_dataset, given)
        if eval_dataset is not None:
            fields |= eval_fields(inputs, eval_dataset, given)
        self.config: Config = build_config(fields, given, where="Trainer")
        check_effect(self.config, Origin("Trainer"))
        check_unread(self.config, "Trainer")
        if is_url(where := self.config.run.checkpoint_dir or ""):
            raise UserError(f"Trainer: run.checkpoint_dir: {where}: `model` needs a path, no URL")
        self.args: Any = self.config
        """The `args` of callbacks."""
        self.run_dir = run_dir
        self.is_trained = False
        """Whether `train` has returned."""
        self._has_begun = False
        """Whether the run in `run_dir` is this trainer's."""
        self._is_named = given.run.output_dir is not None  # else the name is only a proposal
        self._inputs = inputs
        self._given_model = model if hasattr(model, "save_pretrained") else None
        self._given_tokenizer = processing_class or inputs.tokenizer_of_model
        self._callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add_callback(callback)
        self._state: Any = None

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Summary:
        """Run to the end and return the summary; the run directory is `self.run_dir`.

        A second call starts a new run from the trained model, in a directory beside the first.
        `resume_from_checkpoint` resumes the run in `run.output_dir` under this configuration, as
        `rhymeflow resume` does; the path of its newest checkpoint means the run.

        Nothing is written before this call, and a `UserError` before the first step leaves no run
        directory. Of several trainers with one `run.output_dir` only the first to train gets it.
        """
        from rhymeflow.runtime.train import train

        if resume_from_checkpoint:
            return self._resume(resume_from_checkpoint)
        if self.is_trained:
            self._begin_again()
        config = self.config
        if not self._is_named:  # another run may have taken the name in the meantime
            config = config.changed(run={"output_dir": None})
        return self._watched(partial(train, config, begin=self._begin))

    def _begin(self, run_dir: Path) -> Config:
        """Take the run's directory as `run_dir`, write the inputs, and return the configuration."""
        if run_dir != self.run_dir:
            self._move(run_dir)
        self._has_begun = self._is_named = True
        if self._inputs.folder.parent == run_dir or not self._inputs.folder.exists():
            self._inputs.write()
        return self.config

    def _begin_resumed(self, run_dir: Path) -> None:
        self._inputs.write(begun=True)
        self._has_begun = True

    def _resume(self, resume_from_checkpoint: bool | str | Path) -> Summary:
        from rhymeflow.runtime.resume_options import with_values
        from rhymeflow.runtime.train import resume

        if not isinstance(resume_from_checkpoint, bool):
            given, named = str(resume_from_checkpoint), Path(resume_from_checkpoint).resolve()
            if not self.has(named):
                raise UserError(
                    f"Trainer: resume_from_checkpoint = {given!r}: is not in the "
                    f"run directory {self.run_dir}"
                )
            *older, newest = [*paths_of(self.run_dir).values()] or [named]
            if named in [each.resolve() for each in older]:
                raise UserError(
                    f"Trainer: resume_from_checkpoint = {given!r}: the run goes "
                    f"on from its end, after {newest.name}; to go back, begin a new run with this "
                    "checkpoint as its model"
                )
        change = partial(with_values, changes=self.config)
        return self._watched(partial(resume, self.run_dir, change, begin=self._begin_resumed))

    def _watched(self, run: Callable[..., Summary]) -> Summary:
        """Call `run(observer=...)`, and update this trainer and its callbacks when it returns."""
        observer = self._callback_observer() if self._callbacks else None
        try:
            summary = run(observer=observer)
        finally:
            self._has_begun = self._has_begun and self.holds_a_run
            for name in ("model", "processing_class"):
                self.__dict__.pop(name, None)
            if observer is None:
                self._state = None
            elif not observer.state.global_step and self._has_begun:  # it was finished already
                observer.begin(metrics.read(self.run_dir))
        self._after_training(summary.seconds)
        if observer is not None:
            observer.end()
        return summary

    # -- while it trains -------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an instance of the callback class given."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first of a class; None if there is none."""
        is_class = isinstance(callback, type)
        for known in self._callbacks:
            if known is callback or (is_class and isinstance(known, callback)):
                self._callbacks.remove(known)
                return known
        return None

    remove_callback = pop_callback

    def _callback_observer(self) -> Any:
        self._state = self._new_state()
        return Callbacks(
            self._callbacks, self.args, self._state, self.rhythm, lambda: self.processing_class,
            self.config.run.best_metric,
        )  # fmt: skip

    def _new_state(self) -> Any:
        from transformers.trainer_callback import TrainerState

        versions = self.config.learner.max_steps
        epochs = max(1, round(self.rhythm.epoch(versions)))
        max_steps = versions * self.rhythm.steps_per_version
        return TrainerState(max_steps=max_steps, num_train_epochs=epochs, epoch=0.0)

    # -- afterwards ------------------------------------------------------------------------------

    @property
    def holds_a_run(self) -> bool:
        """Whether there is a run in `run_dir`."""
        return (self.run_dir / EVENTS).exists()

    def has(self, checkpoint: bool | str | Path | None) -> bool:
        """Whether a path is the run directory's, or in it."""
        named = Path(checkpoint).resolve() if isinstance(checkpoint, str | Path) else None
        return named is not None and named.is_relative_to(self.run_dir.resolve())

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this trainer's run, or with `takes_best` the best one."""
        if not self._has_begun:
            return None
        paths = paths_of(self.run_dir)
        best = self._best(paths) if self.takes_best else None
        return paths[max(paths) if best is None else best] if paths else None

    def _best(self, versions: Iterable[int]) -> int | None:
        """Return the newest of these versions with the greatest `run.best_metric`; None if none has
        the metric."""
        rows, metric = metrics.read(self.run_dir), self.config.run.best_metric
        known = [(rows[v][metric], v) for v in versions if metric in rows.get(v, {})]
        return max(known)[1] if known else None

    @property
    def state(self) -> Any:
        """transformers' `TrainerState`: `global_step`, `max_steps`, `epoch`, `log_history`, and of
        the best kept checkpoint `best_global_step`, `best_metric`, `best_model_checkpoint`."""
        if self._state is None:
            self._state = self._new_state()
            rows = metrics.read(self.run_dir) if self.is_trained else {}
            history = History(self.rhythm)
            history.read(rows)
            self._state.log_history = history.entries
            reached = max((v for v, row in rows.items() if "loss" in row), default=0)
            self._state.global_step = reached * self.rhythm.steps_per_version
            self._state.epoch = self.rhythm.epoch(reached)
        return self._state

    @cached_property
    def model(self) -> Any:
        """The policy, a `PreTrainedModel`. A model given as an object gets the trained weights,
        but stays as it is if an adapter was trained."""
        if self._given_model is not None and not self.is_trained:
            return self._given_model
        from rhymeflow.models.load import resolve_dtype
        from rhymeflow.models.lora import adapter_in, load_policy
        from rhymeflow.models.precision import resolve_device

        source = self._model_config()
        device = resolve_device(source)
        loaded = load_policy(source, dtype=resolve_dtype(source, device), device=device)
        if self._given_model is None or adapter_in(loaded) is not None:
            return loaded
        self._given_model.load_state_dict(loaded.state_dict())
        stop_ids = loaded.generation_config.eos_token_id  # as in transformers' Trainer
        self._given_model.generation_config.eos_token_id = stop_ids
        return self._given_model

    @cached_property
    def processing_class(self) -> Any:
        """The tokenizer."""
        if self._given_tokenizer is not None:
            return self._given_tokenizer
        from rhymeflow.models.tokenizer import load_tokenizer

        return load_tokenizer(self._model_config())

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval", **_: Any
    ) -> dict[str, float]:
        """Evaluate the policy on `eval_dataset`; by default on the held-out prompts, or on the
        configuration's suites if there are none.

        Return `eval_reward`, `eval_completions/mean_length` and `eval_completions/clipped_ratio`;
        of several reward functions `eval_rewards/FUNCTION/mean`; of several datasets these for
        each, as `eval_NAME_reward`.
        """
        from rhymeflow.evaluation.evaluate import evaluate

        config = self.config.model_copy(update={"model": self._model_config()})
        with TemporaryDirectory() as folder:
            if not self._has_begun:
                self._inputs.write(Path(folder))
                config = _with_inputs(config, self._inputs.folder, Path(folder))
            suites = [EvalSuite(name="held_out")]
            if eval_dataset is not None:
                suites = _suites(eval_dataset, Path(folder))
            elif config.data.eval_source is None:
                suites = list(config.eval.suites)
                if not suites:
                    raise UserError("Trainer: evaluate() needs an eval_dataset")
            results = evaluate(
                config.changed(eval={"suites": tuple(suites)}, data={"eval_size": None})
            )
        values: dict[str, float] = {}
        for result in results:
            name = f"_{result.suite.name}" if len(suites) > 1 else ""
            prefix = f"{metric_key_prefix}{name}"
            values[f"{prefix}_reward"] = result.figures[f"avg@{result.suite.n}"]
            values[f"{prefix}_completions/mean_length"] = result.figures["mean_length"]
            values[f"{prefix}_completions/clipped_ratio"] = result.figures["clipped_ratio"]
            for figure, value in result.figures.items():
                if figure.startswith(OF_FUNCTION):
                    function = figure.removeprefix(OF_FUNCTION)
                    values[f"{prefix}_rewards/{function}/mean"] = value
        self.state.log_history.append({**values, "step": self.state.global_step})
        return values

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the policy and its tokenizer, by default to the run directory."""
        target = Path(output_dir) if output_dir is not None else self.run_dir
        if self.checkpoint is None:
            from rhymeflow.learner.checkpoint import generation_config  # loads torch

            model, tokenizer = self.model, self.processing_class
            model.generation_config = generation_config(model, tokenizer)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
            return
        target.mkdir(parents=True, exist_ok=True)
        for path in self.checkpoint.iterdir():
            if path.is_file():  # the directory `learner/` is for resuming only
                shutil.copy2(path, target / path.name)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        repo_id: str | None = None,
        private: bool | None = None,
    ) -> Any:
        """Upload the policy, its tokenizer and a model card, if the run has one, to the Hugging
        Face hub; return the hub's answer. It waits for that, `blocking` or not. `repo_id` is by
        default the run directory's name, in the account of the token."""
        from huggingface_hub import HfApi

        hub = self.hub
        api = HfApi(token=token or hub.get("token"))
        name = repo_id or hub.get("repo_id") or self.run_dir.name
        private = hub.get("private") if private is None else private
        repo = api.create_repo(name, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save_model(folder)
            if (card := self.run_dir / "README.md").is_file():
                shutil.copy2(card, folder)
            return api.upload_folder(
                repo_id=repo.repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision or hub.get("revision"),
            )

    # -- helpers ---------------------------------------------------------------------------------

    def _model_config(self) -> Any:
        if self.checkpoint is None:
            return self.config.model
        trained: dict[str, Any] = {"name": str(self.checkpoint), "tokenizer": None}
        trained |= {"gguf_file": None, "lora": LoraConfig()}  # of an adapter it is the directory
        return self.config.model.model_copy(update=trained)

    def _move(self, run_dir: Path) -> None:
        """Make `run_dir` the run's directory, and that of its inputs."""
        self.config = _with_inputs(self.config, self._inputs.folder, run_dir / "inputs")
        self._inputs.folder = run_dir / "inputs"
        self._go_to(run_dir)

    def _go_to(self, run_dir: Path) -> None:
        self.config = self.config.changed(run={"output_dir": str(run_dir)})
        self.run_dir = run_dir

    def _after_training(self, seconds: float) -> None:
        """Add the entry of the whole run to the state, and the best checkpoint."""
        self.is_trained = True
        state, rows = self.state, metrics.read(self.run_dir)
        losses = [row["loss"] for row in rows.values() if row.get("loss") is not None]
        whole = {"train_runtime": seconds, "train_loss": sum(losses) / max(len(losses), 1)}
        state.log_history.append({**whole, "epoch": state.epoch, "step": state.global_step})
        paths = paths_of(self.run_dir)
        if (best := self._best(paths)) is not None:
            state.best_metric = rows[best][self.config.run.best_metric]
            state.best_global_step = best * self.rhythm.steps_per_version
            state.best_model_checkpoint = str(paths[best])
        if self._given_model is not None:
            _ = self.model  # loads the trained weights into the model object

    def _begin_again(self) -> None:
        """Prepare a new run from the trained model, in a directory beside this one."""
        run_dir, self.is_trained = self.run_dir, False
        if self.checkpoint is None:
            raise UserError(f"Trainer: {run_dir} has no checkpoint to train on from")
        self.config = self.config.model_copy(update={"model": self._model_config()})
        self._go_to(beside(run_dir))
        self._state = None


def beside(run_dir: Path) -> Path:
    """Return the first of `NAME-2`, `NAME-3`, ... that holds no run."""
    paths = (run_dir.with_name(f"{run_dir.name}-{number}") for number in count(2))
    return next(path for path in paths if not (path / EVENTS).exists())


def latest(run_dir: Path) -> Path:
    """Return the newest of this run directory and those that `beside` named after it."""
    free = beside(run_dir)
    number = int(free.name.rpartition("-")[2])
    return run_dir if number == 2 else run_dir.with_name(f"{run_dir.name}-{number - 1}")


def _suites(eval_dataset: Any, folder: Path) -> list[EvalSuite]:
    datasets = eval_dataset if isinstance(eval_dataset, Mapping) else {"held_out": eval_dataset}
    inputs = Inputs(folder)
    suites = [
        EvalSuite(name=str(name), source=inputs.rows(rows, f"eval-{eval_name(str(name))}")[0])
        for name, rows in datasets.items()
    ]
    inputs.write()
    return suites


def _with_inputs(config: Config, old: Path, new: Path) -> Config:
    """Return the configuration with the directory `new` for `old` in all paths."""
    before, after = (json.dumps(f"{path}/")[:-1] for path in (old, new))
    text = json.dumps(config.model_dump(mode="json")).replace(before, after)
    return validate(json.loads(text), Origin("Trainer"))


def _config(given: Config | Mapping[str, Any] | None) -> Config:
    if isinstance(given, Config):
        return given
    if given is None or isinstance(given, Mapping):
        return build_config(given or {}, where="Trainer")
    raise UserError(
        f"Trainer: config is a {type(given).__name__}; give a rhymeflow.Config or a mapping of "
        'fields, such as {"learning_rate": 1e-5}; rhymeflow.trl.GRPOTrainer takes a GRPOConfig'
    )
