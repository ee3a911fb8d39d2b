"""`Trainer`: the same run from Python objects, for a user of TRL's `GRPOTrainer`.

Holds true: a trainer is a `Config` plus files; what is handed in as objects (a model, a dataset, a
reward function) is written down or named so that other processes can load it, and the run can be
repeated from its run directory. Knows nothing of how a run is carried out.

Reward functions run in processes of their own, so each must be one that can be imported: a function
of a module or a file, no lambda, closure or method.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config, RewardFunction
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.runtime import run_dir

if TYPE_CHECKING:
    from rhymeflow.observe.summary import Summary

Reward = str | Callable[..., Any] | RewardFunction
Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


class Trainer:
    """One run.

    `model` is a directory, a hub name (see `ModelConfig.name`), or a `PreTrainedModel` together
    with its tokenizer as `processing_class`. `reward_funcs` is one reward function or several:
    callables with TRL's signature, names as in `RewardFunction.function`, or `RewardFunction`s with
    weights. Datasets are paths or iterables of rows (a list of dicts, a `datasets.Dataset`); with
    a `train_dataset` and no `eval_dataset` nothing is held out, as in TRL.
    `environment_factory` is a class of which each response gets an object (or a function that makes
    one), `tools` are functions that the policy may call: see docs/environments.md.
    `config` is a `Config` or a mapping of its fields, for which the last name will do where only
    one field is so called: `{"learning_rate": 1e-5, "num_generations": 8}`. `args` is the same
    under TRL's name.

        if __name__ == "__main__":  # the workers import this file
            trainer = Trainer(model="some/model", reward_funcs=reward, train_dataset=rows,
                              config={"max_steps": 100})
            summary = trainer.train()

    Raises `UserError` for whatever cannot be carried over to the workers.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Reward | list[Reward] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        config: Config | Mapping[str, Any] | None = None,
        *,
        args: Config | Mapping[str, Any] | None = None,
        processing_class: Any = None,
        environment_factory: str | Callable[..., Any] | None = None,
        tools: list[str | Callable[..., Any]] | None = None,
    ) -> None:
        if config is not None and args is not None:
            raise UserError("Trainer: config and args are two names of one thing; give one")
        self.config = _config(config if config is not None else args)
        self.run_dir = run_dir.choose_run_dir(self.config)
        self._inputs: list[Callable[[], object]] = []
        """Each writes down an object that was handed in."""
        fields: dict[str, Any] = {"run.output_dir": str(self.run_dir)}
        if model is not None:
            fields["model.name"] = self._model_name(model, processing_class)
        if reward_funcs is not None:
            several = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            functions = [reward_function(each) for each in several]
            fields["reward.functions"] = [each.model_dump(mode="json") for each in functions]
        if environment_factory is not None:
            name = importable(environment_factory, "environment_factory", is_class=True)
            fields["environment.classes"] = [{"environment": name}]
            if reward_funcs is None:
                fields["reward.functions"] = []
        if tools is not None:
            fields["environment.tools"] = [importable(each, "the tool") for each in tools]
        if train_dataset is not None:
            fields["data.source"], _ = self._dataset_path(train_dataset, "train")
            fields |= {"data.options": {}, "data.eval_size": 0}
        if eval_dataset is not None:
            path, num_rows = self._dataset_path(eval_dataset, "eval")
            fields["data.eval_source"] = path
            fields["data.eval_size"] = num_rows or self.config.data.eval_size
        self.config = build_config(fields, self.config, where="Trainer")
        self._write_inputs()  # last, so that a mistake leaves nothing

    def train(self, resume_from_checkpoint: bool = False) -> Summary:
        """Run to the end and return the summary; the run directory is `self.run_dir`.

        `resume_from_checkpoint`: go on with the run that `run.output_dir` holds, as `rhymeflow
        resume` does, under this configuration. A `UserError` before the first step leaves no run
        directory.
        """
        if resume_from_checkpoint:
            return self._resume()
        from rhymeflow.runtime.leftovers import was_trained
        from rhymeflow.runtime.train import train

        if self._inputs and not self._folder.exists():  # an earlier try took them away
            self._write_inputs()
        try:
            return train(self.config)
        except UserError:
            if self._inputs and not was_trained(self.run_dir):
                shutil.rmtree(self._folder)
                if not any(self.run_dir.iterdir()):
                    self.run_dir.rmdir()
            raise

    def _resume(self) -> Summary:
        from rhymeflow.runtime.resume_options import with_values
        from rhymeflow.runtime.train import resume

        return resume(self.run_dir, lambda config: with_values(config, self.config))

    def _write_inputs(self) -> None:
        if self._inputs:
            self._folder.mkdir(parents=True, exist_ok=True)
        for write in self._inputs:
            write()

    def _model_name(self, model: Any, processing_class: Any) -> str:
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        if not hasattr(model, "save_pretrained"):
            raise UserError(f"Trainer: model is a {type(model).__name__}, not a name or a model")
        if processing_class is None:
            raise UserError("Trainer: a model object needs its tokenizer as processing_class")
        folder = self._folder / "model"
        self._inputs.append(lambda: model.save_pretrained(folder))
        self._inputs.append(lambda: processing_class.save_pretrained(folder))
        return str(folder)

    def _dataset_path(self, dataset: Dataset, name: str) -> tuple[str, int | None]:
        """Return where the rows are, and how many, if they were written here."""
        if isinstance(dataset, str | os.PathLike):
            return os.fspath(dataset), None
        lines = [_json_line(row, f"{name}_dataset, row {i}") for i, row in enumerate(dataset)]
        if not lines:
            raise UserError(f"Trainer: {name}_dataset is empty")
        path, text = self._folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines)
        self._inputs.append(lambda: path.write_text(text, encoding="utf-8"))
        return str(path), len(lines)

    @property
    def _folder(self) -> Path:
        return self.run_dir / "inputs"


def reward_function(given: Reward) -> RewardFunction:
    """Name a reward function so that another process can import it.

    A `functools.partial` with keywords becomes the function's `options`. Raises `UserError` for a
    lambda, a closure, a method, or a function typed into a prompt.
    """
    if isinstance(given, RewardFunction):
        return given
    if isinstance(given, str):
        return RewardFunction(function=given)
    if isinstance(given, functools.partial) and not given.args:
        named = reward_function(given.func)
        return named.model_copy(update={"options": dict(given.keywords)})
    return RewardFunction(function=importable(given, "the reward function"))


def importable(given: str | Callable[..., Any], what: str, *, is_class: bool = False) -> str:
    """Name a function (or, with `is_class`, a class) so that another process can import it.

    Raises `UserError` for a lambda, a closure, a method, or what was typed into a prompt.
    """
    if isinstance(given, str):
        return given
    name = getattr(given, "__qualname__", type(given).__name__)
    may_be = inspect.isfunction(given) or (is_class and inspect.isclass(given))
    if not may_be or not name.isidentifier():
        how = "class" if is_class else "def"
        raise UserError(
            f"Trainer: {what} {name} cannot be imported by another process; define it "
            f"with `{how}` at the top of a file"
        )
    try:
        path = inspect.getsourcefile(given)
    except TypeError:
        path = None
    in_package = "." in given.__module__ or (path is not None and Path(path).stem == "__init__")
    if in_package:  # it may import its neighbours
        return f"{given.__module__}.{name}"
    if path is None or not Path(path).is_file():
        raise UserError(
            f"Trainer: {what} {name} is in no file, so other processes cannot import "
            "it; write it into a .py file"
        )
    return f"{Path(path).resolve()}:{name}"


def _config(given: Config | Mapping[str, Any] | None) -> Config:
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return build_config(given, where="Trainer")
    raise UserError(
        f"Trainer: config is a {type(given).__name__}; give a rhymeflow.Config or a mapping of "
        'fields, such as {"learning_rate": 1e-5}'
    )


def _json_line(row: Mapping[str, Any], where: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"Trainer: {where}: is a {type(row).__name__}, should be a mapping")
    try:
        return json.dumps(dict(row), ensure_ascii=False)
    except TypeError as error:
        raise UserError(f"Trainer: {where}: cannot be written as JSON: {error}") from None
